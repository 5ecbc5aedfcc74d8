"""The contract of a model family: what the modules of `trials.model.families` offer to the rest of the package."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials import plugins
from trials.arrays import Ints
from trials.data.records.sample import NO_GRIDS, Encoder
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.refusals.structure import of_class, of_modules
from trials.model.refusals.unsupported import reason
from trials.sharing.group import SharingGroup

LayerRunner: TypeAlias = Callable[[nn.Module, int, torch.Tensor], torch.Tensor]
"""(a layer, its number in its tower, states) -> states of the same shape. May run twice, for recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Images:
    """Images as an encoder prepares them, and the tokens in their places."""

    pixels: torch.Tensor
    """float32 [units, *unit_shape]"""
    grids: torch.Tensor
    """int64 [images, G] (see `PackTokens`)"""
    input_ids: torch.Tensor
    """int64 [image tokens]: those that the projected features replace, and what stands between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModules:
    """The vision side of a model, in the order of the chain. Together they hold every parameter of that side once."""

    embedding: tuple[nn.Module | nn.Parameter, ...] = ()
    layers: tuple[nn.Module, ...] = ()
    """The layers that a plan distributes over the stages. States keep their shape from layer to layer."""
    kept: tuple[int, ...] = ()
    """Numbers of the layers whose states `image_features` takes too, in ascending order."""
    added: int = 0
    """Number of the first language layers behind each of which one of the features of `image_features` is added."""
    behind: tuple[nn.Module, ...] = ()
    """What belongs to the tower behind its layers, such as the last norm. The stage of the projector holds it, so that
    a stage may end with any layer.
    """
    projector: tuple[nn.Module | nn.Parameter, ...] = ()
    unused: tuple[nn.Module, ...] = ()
    """Modules that nothing runs, such as the layers behind the one whose features are taken. Saved as they were."""


class Family(Protocol):
    """Models of one structure in transformers: one module, which says of which configurations.

    A family knows its configuration, how samples are encoded, the vision tower, and how images and text meet in the
    language model. What all families share is elsewhere: cutting, recomputation, weights, memory and schedule.

    Sizes: a *vision unit* is what the tower's work is counted in (a tile, or a merged patch where images keep their own
    resolution); all units of a model have the same shape. T is the number of tokens of a pack, image tokens included.
    Functions of a model must work on any device and dtype, and take a model from which layers of other stages were
    removed.

    A family without a vision side has no vision modules. Its units have no values, no tokens and no cost: the shape of
    one is [0], and `embed_vision` returns them as they are.
    """

    AUTO_MODEL: Any
    """The transformers class whose `from_config` and `from_pretrained` build the model."""
    OTHER_FORMS: Mapping[str, str]
    """Each `model_type` that has the same models in a form that cannot be read, and which form to use instead."""

    # --- the configuration ---

    def takes(self, config: PretrainedConfig) -> bool:
        """Return whether models of this configuration are of this family."""

    def check(self, config: PretrainedConfig) -> None:
        """Raise ModelError for an option that the functions below do not follow. Called before the model is built."""

    def unit_flops(self, config: PretrainedConfig, *, tower: int, projector: int) -> float:
        """Return the floating-point operations of the forward pass of one vision unit, tower and projector together.

        `tower` and `projector` count parameters; that of `tower` includes the embedding.
        """

    def random_images(self, config: PretrainedConfig, units: int) -> Images:
        """Return images with `units` vision units in all, on the CPU, with pixels from a normal distribution."""

    def positions(
        self, config: PretrainedConfig, input_ids: Ints, grids: Ints, seconds: Sequence[float] | None = None
    ) -> Ints:
        """Return the positions [P, tokens] of one sample from its token ids [tokens] and the grids of its images.

        `seconds` [grids] are those between two layers of frames of each video; images have any number.
        """

    def model_inputs(self, config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
        """Return what transformers' own model takes of one sample: its tokens [tokens], and its images if any."""

    def shrink_vision(self, settings: dict[str, Any], layers: int) -> None:
        """Reduce the vision side of a configuration, given as a dictionary, in place.

        It keeps `layers` layers with few narrow heads, and units of few patches, so that a step takes milliseconds.
        The vocabulary has been reduced to VOCABULARY tokens (`trials/model/shrunk.py`), and the ids of image tokens
        must lie in it.
        """

    # --- data ---

    def encoder(self, model_path: str, trust_remote_code: bool = False, max_tokens: int | None = None) -> Encoder:
        """Return the encoder of a model folder, which cuts samples to `max_tokens`.

        Raise ModelError where the tokenizer, the image processor and the configuration do not fit together.
        """

    # --- the model ---

    def vision_modules(self, model: PreTrainedModel) -> VisionModules:
        """Return the modules of the vision side of a whole model, which may be on the meta device."""

    def embed_vision(self, model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
        """Return the states before the first vision layer from pixels [units, *unit_shape]."""

    def vision_runner(self, model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:
        """Return what runs the vision layers of one pack, with all that they share computed once.

        `states` are those of the first layer to run.
        """

    def image_features(
        self, model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
    ) -> Sequence[torch.Tensor]:
        """Return the projected features [features, hidden] that image tokens take in order, none for text alone.

        `states` are those after the last vision layer, then those after each layer of `VisionModules.kept`. Each
        further tensor of the same shape is added to the image tokens behind one language layer, the first behind the
        first.
        """

    def language_runner(
        self,
        model: PreTrainedModel,
        rotary: nn.Module,
        states: torch.Tensor,
        tokens: PackTokens,
        sharing: SharingGroup,
    ) -> LayerRunner:
        """Return what runs the language layers of one pack, with all that they share computed once.

        `rotary` is the module of `Chain.rotary`. `states` [1, t, hidden] are those of the first layer to run, of the t
        tokens of this rank among those that share the pack; `tokens` are all of them. A token sees nothing of other
        samples.
        """


def join_samples(
    family: Family, config: PretrainedConfig, samples: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> PackTokens:
    """Return the tokens of a pack of samples, each given as (ids [tokens], grids [images, G])."""
    ids, grids = zip(*samples, strict=True)
    positions = [family.positions(config, one.numpy(), other.numpy()) for one, other in samples]
    return PackTokens(
        input_ids=torch.cat(ids),
        positions=torch.from_numpy(np.concatenate(positions, axis=1)),
        lengths=tuple(len(each) for each in ids),
        grids=torch.cat([each for each in grids if len(each)] or [torch.from_numpy(NO_GRIDS)]),
    )


def prompt_types(positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what transformers takes of `positions` [P, tokens] that say which tokens are a prompt; else nothing."""
    return {"token_type_ids": positions[1:]} if len(positions) == 2 else {}


FAMILIES: plugins.Plugins[Family] = plugins.Plugins("trials.model.families")


def find_family(config: PretrainedConfig) -> Family | None:
    """Return the family of a configuration; None when models of this kind cannot be trained here."""
    return next((family for _, family in plugins.each(FAMILIES) if family.takes(config)), None)


def load_family(config: PretrainedConfig) -> Family:
    """Return the family of a configuration. Raise ModelError with the reason, and what exists."""
    family = find_family(config)
    if family is None:
        known = ", ".join(name.replace("-", "_") for name in plugins.names(FAMILIES))
        why = reason(config) or of_class(config) or of_modules(config)
        raise ModelError(f"model type {config.model_type!r} is not supported: {why}; supported are: {known}")
    return family


def check_form(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a model in a form of which a family reads another one, with the way to get that one.

    Without this the user would be asked to trust remote code, which does not help.
    """
    named: list[tuple[str, Any]] = [("model_type", settings.get("model_type"))]
    named += [("architecture", name) for name in settings.get("architectures") or ()]
    for _, family in plugins.each(FAMILIES):
        for kind, name in named:
            if name in family.OTHER_FORMS:
                raise ModelError(f"{kind} {name!r} is not supported: {family.OTHER_FORMS[name]}")
