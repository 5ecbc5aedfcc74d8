"""A shrunk copy of a model with random weights, and its results by transformers on single samples."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials.data.records.sample import IGNORED, NO_GRIDS
from trials.model.family import Images, load_family
from trials.model.features import shown_tokens
from trials.model.shrunk import CONTEXT, VOCABULARY

_GAIN = 2.0
"""Factor on weights that would keep a signal's size, so that attention is far from uniform and caps on it show."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmallSample:
    """Random tokens, which may show images."""

    input_ids: torch.Tensor
    """int64 [tokens]"""
    labels: torch.Tensor
    """int64 [tokens], not shifted."""
    images: Images | None

    @property
    def grids(self) -> torch.Tensor:
        return self.images.grids if self.images else torch.from_numpy(NO_GRIDS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmallResults:
    """Results of all samples together."""

    logits: torch.Tensor
    """[tokens of all samples, vocabulary]"""
    loss: torch.Tensor
    """Sum over the targets, []."""
    gradients: dict[str, torch.Tensor]


def _shown_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:  # noqa: A002, ARG001 (as in torch)
    """Multiply by the share which dropout keeps, also while a model does not train.

    So results show where there is dropout, without random numbers. That of attention is left out: layers give it on
    while they train only.
    """
    return input * (1 - p)


@contextmanager
def alone() -> Iterator[None]:
    """Draw from a stream of random numbers of its own, on one thread: threads of small layers wait for each other.

    Dropout shows by its share (see `_shown_dropout`).
    """
    threads, usual = torch.get_num_threads(), nn.functional.dropout
    torch.set_num_threads(1)
    # Not by a mode of torch functions: a backward pass, which recomputes layers, would turn it off.
    nn.functional.dropout = _shown_dropout
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        nn.functional.dropout = usual
        torch.set_num_threads(threads)


def plain_model(config: PretrainedConfig, attention: str = "eager") -> PreTrainedModel:
    """Return transformers' own model of a shrunk configuration, in float32 on the CPU."""
    model: PreTrainedModel = load_family(config).AUTO_MODEL.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights depend on the name alone, not on the order of the parameters.
            torch.manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn_like(parameter)
            if parameter.dim() < 2:  # norms and biases keep what they begin with, which most are 1 or 0
                parameter.add_(noise, alpha=0.2)
            else:
                inputs = parameter[0].numel() if parameter.dim() == 4 else parameter.shape[-1]
                parameter.copy_(noise * _GAIN / inputs**0.5)
    model.eval()  # Noise, such as that of a router, is drawn again in each pass.
    return model


def small_samples(config: PretrainedConfig) -> tuple[SmallSample, ...]:
    """Return samples with and without images, on both sides of the shrunk context.

    Positions and masks may depend on a sample's length. Two units are the fewest that every model takes, since some cut
    each image.
    """
    return (
        _sample(config, units=10, text=2 * CONTEXT),
        _sample(config, units=0, text=5),
        _sample(config, units=2, text=4),
    )


def _sample(config: PretrainedConfig, *, units: int, text: int) -> SmallSample:
    family = load_family(config)
    # Features are put in the places of other tokens, too, such as those of videos.
    reserved = [*family.random_images(config, 1).input_ids.tolist(), *shown_tokens(config)]
    usable = torch.tensor(sorted(set(range(VOCABULARY)) - set(reserved)))
    tokens = usable[torch.randint(len(usable), (text + 1,))]
    images = family.random_images(config, units) if units else None
    shown = images.input_ids if images else tokens[:0]
    return SmallSample(
        input_ids=torch.cat([tokens[:1], shown, tokens[1:]]),
        labels=torch.cat([tokens[:1], torch.full_like(shown, IGNORED), tokens[1:]]),
        images=images,
    )


def plain_results(model: PreTrainedModel, samples: Sequence[SmallSample]) -> SmallResults:
    """Return the results of one forward and backward pass for each sample."""
    family, losses, logits = load_family(model.config), [], {}
    # Shorter ones first: some rotary positions keep the frequencies of the longest sample so far.
    for number, sample in sorted(enumerate(samples), key=lambda each: len(each[1].input_ids)):
        inputs = family.model_inputs(model.config, sample.input_ids, sample.images)
        output = model(**inputs, labels=sample.labels[None])
        # transformers returns the mean over the targets; that of stages is a sum.
        targets = (sample.labels[1:] != IGNORED).sum()
        loss = output.loss * targets
        loss.backward()
        logits[number] = output.logits[0].detach()
        losses.append(loss.detach())
    every = torch.cat([logits[number] for number in range(len(samples))])
    return SmallResults(logits=every, loss=torch.stack(losses).sum(), gradients=gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients that a model has, by the names of its parameters."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_difference(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference, relative to the norm of what is expected."""
    distance, size = (torch.linalg.vector_norm(each).item() for each in (found - expected, expected))
    return float(distance / (size + floor))
