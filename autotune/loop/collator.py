"""The collator of packs for models of transformers, and the check that such a model keeps their samples apart."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from autotune.errors import PackError
from autotune.loop.packed_inputs import packed_inputs, stand_in
from autotune.loop.samples import SampleDataset
from trials.data.loader import MicroBatch, collate
from trials.data.records.sample import IGNORED, Encoded
from trials.errors import ModelError
from trials.model.family import join_samples, load_family
from trials.model.plain.small_copy import (
    SmallSample,
    alone,
    plain_model,
    plain_results,
    relative_difference,
    small_samples,
)
from trials.model.refusals.refusal import refusing
from trials.model.shrunk import shortest_context, shrunk
from trials.model.skeleton import load_config

# As in parity.py: rounding in float32 stays below it, and faults are above 0.1 %.
_TOLERANCE = 1e-4
_LAUNCH = "train it with `autotune launch JOB`, which keeps samples apart itself"
_REMEDY = f"load it with another attn_implementation, or {_LAUNCH}"


class PackCollator:
    """Collator that joins the samples of a pack to one sequence, as the arguments of a model of transformers.

    A batch has input ids [1, T], positions that begin anew in each sample, from which transformers keeps the samples
    apart, labels that no sample shares with another, and the pixels as the model takes them. A pack without images gets
    blank ones without a target, so that the vision tower always runs.

    The model's loss of a pack is the sum over its targets divided by `num_items_in_batch`; give the `target_tokens` of
    the `PackStep`. It does not follow `training.loss_weighting`, which `launch` does.
    """

    def __init__(self, samples: SampleDataset, model: nn.Module) -> None:
        """Check on a small copy of the model that a pack has the results of its samples one by one.

        Raise PackError for another model than the job's, and ModelError where the model's attention does not keep the
        samples apart.
        """
        config = getattr(model, "config", None)
        if not isinstance(config, PretrainedConfig):
            raise PackError(
                f"the model must be one of transformers, not {type(model).__name__}; give it before it is wrapped"
            )
        settings = samples.job.model
        wanted = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
        if _kind(config) != _kind(wanted):
            raise PackError(
                f"the model is {_kind(config)}, but the samples are encoded for {settings.path}, {_kind(wanted)}; load "
                "that model"
            )
        # The attention of the given model, which may have been loaded with another one than the job's default.
        check_packing(wanted, config.get_text_config()._attn_implementation, int(samples.index.text_tokens.max()))
        self._config = wanted
        self._encoder = samples.encoder
        self._stand_in = stand_in(wanted)

    def __call__(self, samples: Sequence[Encoded]) -> dict[str, Any]:
        """Return the arguments of the model for one pack, which may be empty."""
        shown = list(samples)
        if self._stand_in is not None and all(sample.pixel_values is None for sample in shown):
            # Else the tower has no gradients on this rank, and data-parallel wrappers wait for them for ever.
            shown.append(self._stand_in)
        return packed_inputs(self._config, collate(shown, self._encoder, pixels=True, padded=False))


def _kind(config: PretrainedConfig) -> str:
    text = config.get_text_config()
    return f"a {config.model_type!r} with {text.num_hidden_layers} layers and {text.vocab_size} tokens"


def check_packing(config: PretrainedConfig, attention: str, longest: float = math.inf) -> None:
    """Compare logits and loss of a pack with those of its samples one by one, in float32 on the CPU.

    The model is a shrunk copy with the `attention` implementation, such as `sdpa`; no sample has more than `longest`
    tokens. Raise ModelError where a pack has other results, or cannot be run.
    """
    name, context = config.model_type, shortest_context(config)
    is_beyond, remedy = context is not None and longest > context, _REMEDY
    with alone(), refusing(f"packs cannot be run by {name!r} with attention {attention!r}", _REMEDY):
        figures = _differences(config, attention, is_beyond=is_beyond)
        if figures and is_beyond and not _differences(config, attention, is_beyond=False):
            remedy = (
                f"cut them to its context with data.oversize: truncate and data.max_tokens: {context}, or {_LAUNCH}"
            )
    if figures:
        raise ModelError(
            f"the samples of a pack are not kept apart by {name!r} with attention {attention!r}, {figures}; {remedy}"
        )


def _differences(config: PretrainedConfig, attention: str, *, is_beyond: bool) -> str:
    """Describe how far the results of a pack are from those of its samples; an empty text where they are alike.

    Samples of the pack are on both sides of the model's context, or all within it: then only the pack is longer.
    Dynamic rotary positions take the frequencies of the longest sample for all, if it is beyond the context.
    """
    small = shrunk(config)
    samples = small_samples(small)
    if not is_beyond:
        small = shrunk(config, max(len(sample.input_ids) for sample in samples))
    model = plain_model(small, attention)
    expected = plain_results(model, samples)
    with torch.no_grad():
        found = model(**packed_inputs(small, _pack(small, samples)), num_items_in_batch=1)
    differences = {
        "logits": relative_difference(found.logits[0], expected.logits),
        "loss": relative_difference(found.loss, expected.loss),
    }
    if all(each <= _TOLERANCE for each in differences.values()):  # NaN is a difference too
        return ""
    return ", ".join(f"{what} by {each:.2%}" for what, each in differences.items())


def _pack(config: PretrainedConfig, samples: tuple[SmallSample, ...]) -> MicroBatch:
    nothing = torch.tensor([IGNORED])
    return MicroBatch(
        pixel_values=torch.cat([sample.images.pixels for sample in samples if sample.images]),
        tokens=join_samples(load_family(config), config, [(sample.input_ids, sample.grids) for sample in samples]),
        labels=torch.cat([torch.cat([sample.labels[1:], nothing]) for sample in samples]),
    )
