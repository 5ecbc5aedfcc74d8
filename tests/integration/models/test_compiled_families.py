"""Compiled layers of every family: loss, gradients and the number of graphs."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from tests.contracts.test_families import CPU, TINY
from tests.machines.traced import traced
from tests.values.parameters import parameters
from trials import plugins
from trials.data.records.sample import NO_GRIDS
from trials.data.tokens import pack
from trials.engine.compiled import compile_layers, compiled_graphs
from trials.model.cut import Cut
from trials.model.ends.head_loss import targets_of
from trials.model.family import join_samples
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.weights import draw_buffers, draw_weights
from trials.stage import Recomputed

PACKS = ((3, (5, 2)), (1, (11,)), (4, (7, 1, 30, 2)), (2, (4, 4, 4)))
"""Vision units, and text tokens of the samples behind the one that has them."""
OWN_GRAPHS_OF_ONE_UNIT = {"pixtral"}


def stage_of(config: PretrainedConfig) -> StageModule:
    """Return the whole model, of whose layers one of each kind is not recomputed."""
    skeleton = build_skeleton(config, torch.float32)
    vision, language = len(skeleton.chain.vision_layers), len(skeleton.chain.language_layers)
    whole = Cut(
        vision=range(vision),
        language=range(language),
        levels=(Recomputed(vision=max(0, vision - 1), language=language - 1),),
        embeds=True,
        projects=True,
        heads=True,
    )
    stage = StageModule(skeleton, whole)
    draw_weights(stage.model, stage.paths, 0, CPU)
    draw_buffers(stage.model, stage.chain.buffers, CPU)
    stage.tie()
    return stage


def results(stage: StageModule, units: int, texts: Sequence[int]) -> tuple[float, torch.Tensor]:
    """Return the loss of a pack, and its gradients in a row."""
    torch.manual_seed(units)
    config, family = stage.model.config, stage.family
    images, nothing = family.random_images(config, units), torch.from_numpy(NO_GRIDS)
    samples = [(images.input_ids, images.grids), *((torch.ones(n, dtype=torch.int64), nothing) for n in texts)]
    tokens = join_samples(family, config, [each for each in samples if len(each[0])])
    labels = torch.randint(1, 20, (len(tokens.input_ids),))
    loss = stage(pack((images.pixels,), tokens), targets_of(labels, torch.tensor(1.0)))
    stage.zero_grad()
    loss.backward()
    gradients = [each.grad.flatten() for each in stage.parameters() if each.grad is not None]
    return loss.item(), torch.cat(gradients)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it does itself
@pytest.mark.parametrize("name", parameters({name: name for name in plugins.names(TINY)}, short=()))
def test_compiled_layers_have_the_gradients_of_plain_ones_and_no_further_graph_for_other_packs(
    name: str, tmp_path: Path
) -> None:
    plugins.load(TINY, name).make(tmp_path)
    config = load_config(str(tmp_path))
    plain, compiled = stage_of(config), stage_of(config)
    graphs = []
    with traced("aot_eager"):
        compile_layers(compiled)
        before = compiled_graphs()
        for units, texts in PACKS:
            (loss, gradients), (expected, usual) = (results(stage, units, texts) for stage in (compiled, plain))
            assert loss == pytest.approx(expected, rel=1e-5)
            assert (gradients - usual).norm() < 1e-5 * usual.norm()
            graphs.append(compiled_graphs() - before)
    assert graphs[0] > 0
    assert graphs[1:] == [graphs[1]] * (len(PACKS) - 1)
    assert (graphs[1] > graphs[0]) == (name in OWN_GRAPHS_OF_ONE_UNIT)
