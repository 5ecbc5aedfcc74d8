"""The layouts with which a model can be trained on a number of devices."""

from trials.plan import Layout, ZeroStage
from trials.workload import ModelShape

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


def zero_stages(model: ModelShape, data: int) -> tuple[ZeroStage, ...]:
    """Return the ZeRO stages to try, the plainest first."""
    if model.dtype == "bfloat16":
        return (1,)
    return _ZERO_OF_DATA_PARALLEL if data > 1 else (0,)


def layout_name(layout: Layout) -> str:
    """Return the name of a layout in the study: `p2-d1-z0`, or `p2-d1-t4-z0` with tensor degree 4."""
    tensor = f"-t{layout.tensor}" if layout.tensor > 1 else ""
    return f"p{layout.pipeline}-d{layout.data}{tensor}-z{layout.zero}"
