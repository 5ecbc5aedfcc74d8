"""A stage with one layer of each kind that a model has: enough to time all layers, however large the model."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from trials.costs.coefficients import LayerKind
from trials.job import ModelSection, TrainingSection
from trials.model.cut import Cut
from trials.model.layer_kinds import kinds_of
from trials.model.paths import parameters_at
from trials.model.skeleton import Skeleton, build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.trained import choose_trained, draw_trained
from trials.model.weights import draw_buffers, draw_weights
from trials.stage import Recomputed, Tower

Draw: TypeAlias = Callable[[PreTrainedModel, Iterable[str], int, torch.device], None]
"""Function that fills weights, from a seed."""


class OneOfEach(StageModule):
    """A layer of each kind of both towers, and both ends. The first layer of a tower is of its most frequent kind."""

    def __init__(self, skeleton: Skeleton, *, only_usual: bool) -> None:
        """Take over `skeleton.model` with the layers of the most frequent kind or, if that is not enough, of all."""
        chain = skeleton.chain
        kinds: dict[Tower, tuple[tuple[int, int], ...]] = {
            "vision": kinds_of(skeleton.modules(chain.vision_layers)),
            "language": kinds_of(skeleton.modules(chain.language_layers)),
        }
        if only_usual:
            kinds = {tower: of_tower[:1] for tower, of_tower in kinds.items()}
        vision, language = (tuple(number for number, _ in of_tower) for of_tower in kinds.values())
        super().__init__(
            skeleton,
            Cut(
                vision=vision,
                language=language,
                embeds=True,
                projects=True,
                heads=True,
                levels=(Recomputed(vision=0, language=0),),
            ),
        )
        self.kept_states = chain.kept
        """`Chain.kept` of the whole model."""
        # The projector may take the states of several layers; those of one stand for all.
        self.chain = replace(chain, kept=vision[:1] * len(chain.kept))
        self.shares: dict[Tower, dict[int, float]] = {
            tower: {number: count / sum(count for _, count in of_tower) for number, count in of_tower}
            for tower, of_tower in kinds.items()
        }
        """Share of the layers of a tower that are of the kind of each layer here, by its number."""

    @property
    def paths_by_kind(self) -> dict[LayerKind, tuple[str, ...]]:
        """The paths of one layer of each kind; of layers of a tower that differ, of the most frequent."""
        chain, cut = self.chain, self.cut
        return {
            "vision_embedding": chain.vision_embedding,
            "vision": tuple(chain.vision_layers[number] for number in cut.vision[:1]),
            "projector": chain.projector,
            "language": tuple(chain.language_layers[number] for number in cut.language[:1]),
            "head": chain.head,
        }

    @property
    def parameters_by_kind(self) -> dict[LayerKind, list[nn.Parameter]]:
        return {
            kind: [parameter for path in paths for _, parameter in parameters_at(self.model, path)]
            for kind, paths in self.paths_by_kind.items()
        }


def one_of_each(
    settings: ModelSection,
    training: TrainingSection,
    device: torch.device,
    draw: Draw = draw_weights,
    *,
    only_usual: bool = False,
) -> OneOfEach:
    """Return one layer of each kind that the model has, or `only_usual` ones: a layer of each tower."""
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    choose_trained(skeleton, training)
    stage = OneOfEach(skeleton, only_usual=only_usual)
    draw(stage.model, stage.paths, training.seed, device)
    draw_trained(stage.model, stage.paths, training)
    draw_buffers(stage.model, stage.chain.buffers, device)
    return stage
