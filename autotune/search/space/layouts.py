"""The layouts with which a model can be trained on a number of devices, and their names."""

import re

from autotune.errors import JobError
from trials.errors import InvalidPlan
from trials.plan import Layout, Offload, ZeroStage
from trials.workload import ModelShape, Workload

_ZERO_OF_DATA_PARALLEL: tuple[ZeroStage, ...] = (0, 1)
_SHARDING: tuple[ZeroStage, ...] = (2, 3)
_ZERO_STAGES = (*_ZERO_OF_DATA_PARALLEL, *_SHARDING)
OFFLOADS: dict[str, Offload] = {"ov": "vision", "ol": "language", "ovl": "both"}
"""Kinds of layers that offload, by the end of a layout's name."""
_NAME = re.compile(r"p(\d{1,9})-d(\d{1,9})(?:-t(\d{1,9}))?-z([0-3])(?:-w(\d{1,9}))?(?:-(ov|ol|ovl))?")


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
    return tuple(Layout(pipeline=1, data=devices, zero=zero) for zero in _SHARDING) if devices > 1 else ()


def zero_stages(model: ModelShape, data: int) -> tuple[ZeroStage, ...]:
    """Return the ZeRO stages to try, the plainest first."""
    if model.dtype == "bfloat16":
        return (1,)
    return _ZERO_OF_DATA_PARALLEL if data > 1 else (0,)


def layout_name(layout: Layout) -> str:
    """Return the name of a layout in the study: `p2-d1-z0`, or `p2-d1-t4-z0` with tensor degree 4.

    `-w4` follows where 4 data ranks of a node average gradients first, and `-ov`, `-ol` or `-ovl` where vision layers,
    language layers or both offload what they keep.
    """
    tensor = f"-t{layout.tensor}" if layout.tensor > 1 else ""
    within = f"-w{layout.reduce_within}" if layout.reduce_within > 1 else ""
    offload = "".join(f"-{name}" for name, kinds in OFFLOADS.items() if kinds == layout.offload)
    return f"p{layout.pipeline}-d{layout.data}{tensor}-z{layout.zero}{within}{offload}"


def named_layout(name: str, workload: Workload) -> Layout | None:
    """Return the layout of a name such as `p1-d4-z3`, of those beyond `layouts`; None for another name.

    Raise JobError, with the arithmetic, for one that these devices or a chain of these layers cannot have.
    """
    found = _NAME.fullmatch(name)
    if found is None or (found[3] is found[5] is found[6] is None and int(found[4]) < _SHARDING[0]):
        return None
    pipeline, data, tensor, zero, within = (int(number or 1) for number in found.groups()[:-1])
    try:
        layout = Layout(
            pipeline=pipeline,
            data=data,
            tensor=tensor,
            zero=_ZERO_STAGES[zero],
            reduce_within=within,
            offload=OFFLOADS.get(found[6], "none"),
        )
    except InvalidPlan as error:
        raise refused(name, str(error)) from error
    model, devices = workload.model, workload.hardware.devices
    if layout.world_size != devices:
        degrees = (pipeline, data) if found[3] is None else (pipeline, data, tensor)
        product = " x ".join(map(str, degrees))
        raise refused(name, f"{product} = {layout.world_size} ranks are not the {devices} devices")
    if (layers := model.vision_layers + model.language_layers) < pipeline:
        raise refused(name, f"{pipeline} stages need a layer each but the model has {layers}")
    if model.dtype == "bfloat16" and zero == 0:
        raise refused(name, "bfloat16 weights need ZeRO 1, which keeps a float32 copy of them")
    if layout_name(layout) != name:
        raise refused(name, f"a degree of 1 is left out, so that the name is {layout_name(layout)}")
    groups = layout.grid.data_ranks_of_node(workload.hardware.of_node)
    if within > 1 and groups == 1:
        raise refused(name, f"no stage has several data ranks on each of several nodes; leave -w{within} out")
    if within not in (1, groups):
        raise refused(name, f"{groups} data ranks of a stage are neighbours on a node, not {within}; use -w{groups}")
    if zero in _SHARDING and data == 1:
        raise refused(name, f"ZeRO {zero} shares gradients among data ranks, and there is only one; use ZeRO 1")
    return layout


def refused(name: str, why: str) -> JobError:
    """Return the error for a named layout that cannot be searched."""
    return JobError(f"search.space.layouts: {name!r} cannot be searched: {why}")
