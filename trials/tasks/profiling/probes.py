"""Probes: each kind of layer, with inputs of several sizes."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from trials.costs.coefficients import LayerKind
from trials.data.records.sample import NO_GRIDS
from trials.data.tokens import PackTokens, pack
from trials.model.ends.head_loss import Targets, targets_of
from trials.model.family import LayerRunner, join_samples
from trials.model.features import join_text
from trials.model.stage import run_again, run_layer
from trials.model.weight_gradients import WeightGradients
from trials.recomputation.selective import run_selectively
from trials.sharing.group import SharingGroup
from trials.stage import Recomputed
from trials.tasks.profiling.one_of_each import OneOfEach
from trials.tasks.request import ProbeSizes

Run = Callable[[torch.Tensor], torch.Tensor]
_UNSHARED = SharingGroup()
_TEXT_TOKENS = (1, 256, 64, 1024)
"""Text tokens next to the images, in turns, so that the fit separates the costs of text and images in the projector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One layer with one input."""

    layer: LayerKind
    number: int = 0
    """Number of the layer in its tower."""
    share: float = 1.0
    """Share of the layers of its tower for which it stands: where they differ, probes with one input follow."""
    units: int = 0
    tokens: int = 0
    squares: int = 0
    states: torch.Tensor
    run: Run
    recomputed: Run | None = None
    """The layer with recomputation, for kinds that can be recomputed."""
    selective: Run | None = None
    """The layer with selective recomputation; None where it is compiled, and the compiler decides what is kept."""
    deferred: tuple[Run, WeightGradients] | None = None
    """The layer, and what defers its weight gradients; None for kinds that defer none, and where it is compiled."""
    twice: Run | None = None
    """Two such layers one after the other, for kinds of which a stage can hold several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeBytes:
    """Bytes of the layer of a probe, as in `LayerTiming`."""

    kept: int
    shared: int
    transient: int
    output: int
    selective: int
    selective_peak: int
    weight: int


def probes(stage: OneOfEach, sizes: ProbeSizes, device: torch.device) -> Iterator[Probe]:
    """Yield every kind at these sizes."""
    for number, units in enumerate(sizes.unit_counts):
        text = torch.zeros(_TEXT_TOKENS[number % len(_TEXT_TOKENS)], dtype=torch.long)
        yield from _image_probes(stage, images_of(units, sizes.image_units), text, device)
    for shape in sizes.sample_shapes:
        yield from _language_probes(stage, shape, device, shows=sizes.image_units > 0)


def images_of(units: int, image_units: int) -> tuple[int, ...]:
    """Return the units of each image of a pack: all have the usual size but the last one, which has the rest.

    Where images keep their own resolution, each attends to itself, so that a large one costs more than several.
    """
    if not 0 < image_units < units:
        return (units,)
    whole, rest = divmod(units, image_units)
    return (*(image_units,) * whole, *((rest,) if rest else ()))


def _image_probes(
    stage: OneOfEach, of_images: tuple[int, ...], text: torch.Tensor, device: torch.device
) -> Iterator[Probe]:
    family, model, units = stage.family, stage.model, sum(of_images)
    images = [family.random_images(model.config, each) for each in of_images]
    samples = [(image.input_ids, image.grids) for image in images[1:]]
    # Behind the first image, since a sample without any token is none.
    samples.insert(0, (torch.cat((images[0].input_ids, text)), images[0].grids))
    tokens = join_samples(family, model.config, samples)
    states = torch.cat([image.pixels for image in images]).to(device)
    if stage.cut.vision:
        yield from _vision_probes(stage, units, states, tokens)
    states = family.embed_vision(model, states, tokens).detach()
    # The projector takes the states of some layers as well; any of the right shape will do.
    kept = (states,) * len(stage.chain.kept)
    yield Probe(
        layer="projector",
        units=units,
        tokens=len(tokens.input_ids),
        states=states,
        # With the features for later layers, as a stage that ends here sends them.
        run=lambda states: pack(
            join_text(model, family.image_features(model, (states, *kept), tokens), tokens, _UNSHARED), tokens
        )[0],
    )


def _vision_probes(stage: OneOfEach, units: int, pixels: torch.Tensor, tokens: PackTokens) -> Iterator[Probe]:
    family, model = stage.family, stage.model
    states = family.embed_vision(model, pixels, tokens).detach()
    yield Probe(
        layer="vision_embedding",
        units=units,
        states=pixels,
        run=lambda pixels: family.embed_vision(model, pixels, tokens),
    )
    runner = family.vision_runner(model, states, tokens)
    for number in stage.cut.vision:
        yield _vision_probe(stage, number, units, states, runner)


def _vision_probe(stage: OneOfEach, number: int, units: int, states: torch.Tensor, runner: LayerRunner) -> Probe:
    layer = stage.model.get_submodule(stage.chain.vision_layers[number])
    run = partial(runner, layer, number)
    return Probe(
        layer="vision",
        number=number,
        share=stage.shares["vision"][number],
        units=units,
        states=states,
        run=run,
        recomputed=lambda states: run_layer(layer, run, states, run_again),
        selective=None if is_compiled(layer) else lambda states: run_layer(layer, run, states, run_selectively),
        deferred=None if is_compiled(layer) else _deferred(layer, run),
        twice=lambda states: run(run(states)),
    )


def _language_probes(stage: OneOfEach, shape: tuple[int, int], device: torch.device, *, shows: bool) -> Iterator[Probe]:
    same = language_probes(stage, shape, device, shows=shows)
    labels = torch.zeros(same[0].tokens, dtype=torch.long)
    targets = Targets(*(each.to(device) for each in targets_of(labels, torch.ones(()))))
    yield from same
    yield Probe(
        layer="head",
        tokens=same[0].tokens,
        states=same[0].states,
        run=lambda states: stage.loss(states, targets),
    )


def language_probes(
    stage: OneOfEach,
    shape: tuple[int, int],
    device: torch.device,
    *,
    shows: bool,
    sharing: SharingGroup = _UNSHARED,
) -> tuple[Probe, ...]:
    """Return a probe of each kind of language layer with a pack of equal samples, of which this rank has its part.

    `shape` is (samples, tokens of each). A sample that `shows` an image begins with one, or with what it has room for:
    in some families the kernel of attention depends on that.
    """
    model, (samples, length) = stage.model, shape
    tokens, ids, grids = samples * length, torch.zeros(length, dtype=torch.long), torch.from_numpy(NO_GRIDS)
    if shows:
        image = stage.family.random_images(model.config, 1)
        shown = image.input_ids[:length]
        ids[: len(shown)], grids = shown, image.grids
    joined = join_samples(stage.family, model.config, [(ids, grids)] * samples)
    part, hidden = tokens // sharing.share.degree, model.config.get_text_config().hidden_size
    states = torch.randn(1, part, hidden, device=device, dtype=model.dtype)
    return tuple(
        replace(_language_probe(stage, number, states, joined, sharing), tokens=tokens, squares=samples * length**2)
        for number in stage.cut.language
    )


def _language_probe(
    stage: OneOfEach, number: int, states: torch.Tensor, joined: PackTokens, sharing: SharingGroup
) -> Probe:
    single, deferring, recomputing, selecting, double = (
        _with_language(stage, sharing, numbers=numbers, recomputed=Recomputed(vision=0, **recomputed))
        for numbers, recomputed in (
            ((number,), {"language": 0}),
            ((number,), {"language": 0}),
            ((number,), {"language": 1}),
            ((number,), {"language": 0, "selective_language": 1}),
            ((number, number), {"language": 0}),
        )
    )
    layer = stage.model.get_submodule(stage.chain.language_layers[number])
    is_plain = not is_compiled(layer)
    gradients = deferring.weight_gradients = WeightGradients([layer]) if is_plain else None
    return Probe(
        layer="language",
        number=number,
        share=stage.shares["language"][number],
        states=states,
        run=lambda states: single.language((states,), joined)[0],
        recomputed=lambda states: recomputing.language((states,), joined)[0],
        selective=(lambda states: selecting.language((states,), joined)[0]) if is_plain else None,
        deferred=(lambda states: deferring.language((states,), joined)[0], gradients) if gradients else None,
        twice=lambda states: double.language((states,), joined)[0],
    )


def _deferred(layer: nn.Module, run: Run) -> tuple[Run, WeightGradients]:
    gradients = WeightGradients([layer])
    return lambda states: run_layer(layer, run, states, gradients.run), gradients


def is_compiled(layer: nn.Module) -> bool:
    return layer._compiled_call_impl is not None


def _with_language(
    stage: OneOfEach, sharing: SharingGroup, *, numbers: tuple[int, ...], recomputed: Recomputed
) -> OneOfEach:
    """Return a view of the same modules that runs language layers of these numbers."""
    view = copy.copy(stage)
    view.sharing = view.attending = (sharing,)
    view.cut = replace(stage.cut, language=numbers, levels=(recomputed,))
    return view
