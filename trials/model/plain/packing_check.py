"""Comparison of a pack with its samples one by one, through transformers' own model on a shrunk copy."""

import torch
from transformers import PretrainedConfig

from trials.data.loader import MicroBatch
from trials.data.records.sample import IGNORED
from trials.errors import ModelError
from trials.model.family import join_samples, load_family
from trials.model.plain.packed_inputs import packed_inputs
from trials.model.plain.small_copy import (
    SmallSample,
    alone,
    plain_model,
    plain_results,
    relative_difference,
    small_samples,
)
from trials.model.refusals.refusal import refusing
from trials.model.shrunk import shrunk

# As in parity.py: rounding in float32 stays below it, and faults are above 0.1 %.
_TOLERANCE = 1e-4
_REMEDY = (
    "load it with another attn_implementation, or train it with `autotune launch JOB`, which keeps samples apart itself"
)


def check_packing(config: PretrainedConfig, attention: str) -> None:
    """Compare logits and loss of a pack with those of its samples one by one, in float32 on the CPU.

    The model is a shrunk copy with the `attention` implementation, such as `sdpa`. Raise ModelError where a pack has
    other results, or cannot be run.
    """
    name = config.model_type
    with alone(), refusing(f"packs cannot be run by {name!r} with attention {attention!r}", _REMEDY):
        small = shrunk(config)
        model = plain_model(small, attention)
        samples = small_samples(small)
        expected = plain_results(model, samples)
        with torch.no_grad():
            found = model(**packed_inputs(small, _pack(small, samples)), num_items_in_batch=1)
    differences = {
        "logits": relative_difference(found.logits[0], expected.logits),
        "loss": relative_difference(found.loss, expected.loss),
    }
    if not all(each <= _TOLERANCE for each in differences.values()):  # NaN is a difference too
        figures = ", ".join(f"{what} by {each:.2%}" for what, each in differences.items())
        raise ModelError(
            f"the samples of a pack are not kept apart by {name!r} with attention {attention!r}, {figures}; {_REMEDY}"
        )


def _pack(config: PretrainedConfig, samples: tuple[SmallSample, ...]) -> MicroBatch:
    nothing = torch.tensor([IGNORED])
    return MicroBatch(
        pixel_values=torch.cat([sample.images.pixels for sample in samples if sample.images]),
        tokens=join_samples(load_family(config), config, [(sample.input_ids, sample.grids) for sample in samples]),
        labels=torch.cat([torch.cat([sample.labels[1:], nothing]) for sample in samples]),
    )
