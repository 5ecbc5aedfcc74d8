"""The layouts that every search tries, and the usual ones with ZeRO 2 and 3."""

from trials.plan import Layout, ZeroStage
from trials.workload import ModelShape

SHARDING: tuple[ZeroStage, ...] = (2, 3)
"""ZeRO stages whose data ranks hold gradients, and with 3 weights too, in shards."""
# ZeRO 1 with one data rank would shard nothing, and ZeRO 2 and 3 exchange more (ZeRO, section 7), so `zero.py` offers
# them alone.
_ZERO_OF_DATA_PARALLEL: tuple[ZeroStage, ...] = (0, 1)


def layouts(model: ModelShape, devices: int) -> tuple[Layout, ...]:
    """Return every pipeline x data on all devices, with ZeRO 0 and 1 where there is data parallelism.

    bfloat16 weights need the float32 copy that ZeRO 1 keeps, also on a single data-parallel rank.
    """
    layers = model.vision_layers + model.language_layers
    found = []
    for pipeline in range(1, min(devices, layers) + 1):
        if devices % pipeline == 0:
            data = devices // pipeline
            found += [Layout(pipeline=pipeline, data=data, zero=zero) for zero in zero_stages(model, data)]
    return tuple(found)


def sharded_layouts(devices: int) -> tuple[Layout, ...]:
    """Return data parallelism over all devices with ZeRO 2 and 3; nothing for a single device."""
    return tuple(Layout(pipeline=1, data=devices, zero=zero) for zero in SHARDING) if devices > 1 else ()


def zero_stages(model: ModelShape, data: int) -> tuple[ZeroStage, ...]:
    """Return the ZeRO stages to try, the plainest first."""
    if model.dtype == "bfloat16":
        return (1,)
    return _ZERO_OF_DATA_PARALLEL if data > 1 else (0,)
