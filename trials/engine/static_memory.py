"""Static bytes of pipeline stages, by formula. Imports no torch, so that predictions start quickly."""

import numpy as np

from trials.arrays import Floats
from trials.plan import Layout

GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient: micro-batches are summed, and data ranks averaged, in float32."""

# DeepSpeed's `reduce_bucket_size` has 500 million by default, a buffer of 2 GB; this one takes 200 MB.
BUCKET = 50_000_000
"""Most gradients that are joined for one message."""


def buffer_bytes(layout: Layout, element_bytes: int) -> int:
    """Return the bytes of DeepSpeed's buffer for gradients in backward passes: it has one for ZeRO 1 in float32.

    Stages of a pipeline have it only after their passes; engines without DeepSpeed have none.
    """
    after = layout.pipeline > 1 or layout.zero == 0 or element_bytes < GRADIENT_BYTES
    return 0 if after or layout.whole_copies or layout.zero > 1 else BUCKET * GRADIENT_BYTES


def static_bytes(parameters: int, element_bytes: int, layout: Layout, *, frozen: int = 0) -> int:
    """Return the bytes of weights, gradients and AdamW's states of a stage, whose `frozen` parameters do not train."""
    counts = (np.array([count], dtype=np.float64) for count in (parameters, frozen))
    return int(stages_static_bytes(*counts, element_bytes=element_bytes, layout=layout)[0])


def stages_static_bytes(parameters: Floats, frozen: Floats, *, element_bytes: int, layout: Layout) -> Floats:
    """Return the static bytes of each of several stages, [stages], as whole numbers; exact below 2^53 bytes.

    `frozen` of the `parameters`, both [stages], have neither gradients nor states. ZeRO 0, for float32 weights alone,
    keeps two float32 moments of every other parameter. ZeRO 1 splits them, and a float32 copy of the weights, over the
    data-parallel ranks; ZeRO 2 splits the gradients too, ZeRO 3 also the weights, frozen ones included (ZeRO paper,
    section 3).
    """
    trained = parameters - frozen
    share = trained / layout.data
    states = 8 * trained if layout.zero == 0 else 12 * share
    gradients = GRADIENT_BYTES * (share if layout.zero >= 2 else trained)
    weights = element_bytes * (parameters / layout.data if layout.zero == 3 else parameters)
    return np.rint(weights + gradients + states)
