"""Steps on a pretended CUDA device: each tensor is on its device, and the host never waits inside a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

from tests.contracts.test_families import TINY
from tests.machines.own_ranks import on_ranks
from tests.machines.pretended_cuda import CUDA, PretendedCuda
from tests.values.parameters import parameters
from trials import plugins
from trials.data.loader import MicroBatch
from trials.engine import base, engine
from trials.engine.optimizer import build_optimizer
from trials.engine.state import OptimizerState
from trials.job import TrainingSection
from trials.model import features
from trials.model.attention import kernels, packed
from trials.model.cut import cut
from trials.model.family import join_samples
from trials.model.paths import allocate
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule
from trials.offload.offloading import Offloading
from trials.offload.transfers import Transfers
from trials.plan import Layout, Packed, Plan
from trials.stage import Stage
from trials.tasks.profiling.links import time_host

PACKING = Packed(qv=10, qt=10_000, qv_min=0, qt_min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of one pack on a pretended device."""

    folder: str
    dtype: str = "bfloat16"
    pipeline: int = 1
    recompute: Literal["none", "whole", "selective"] = "none"
    offload: bool = False
    weighted: bool = False
    text_alone: bool = False
    fault: str = "none"


def plan_of(step: Step, vision: int, language: int) -> Plan:
    """The first stage of two has all vision layers but the last, where there are several, and no language layer."""
    first = max(vision - 1, 0) if step.pipeline > 1 else vision
    counts = [(first, language)] if step.pipeline == 1 else [(first, 0), (vision - first, language)]
    if step.pipeline > 1 and not first:  # a tower of one layer, or none
        counts = [(vision, language // 2), (0, language - language // 2)]
    stages = [
        Stage(
            vision=v,
            language=n,
            recompute_vision=v * (step.recompute == "whole"),
            recompute_language=n * (step.recompute == "whole"),
            selective_vision=v * (step.recompute == "selective"),
            selective_language=n * (step.recompute == "selective"),
        )
        for v, n in counts
    ]
    layout = Layout(pipeline=step.pipeline, data=1, zero=0, offload="both" if step.offload else "none")
    return Plan(packing=PACKING, layout=layout, stages=tuple(stages))


def stages_of(step: Step) -> list[StageModule]:
    config = load_config(step.folder)
    skeletons = [build_skeleton(config, getattr(torch, step.dtype)) for _ in range(step.pipeline)]
    chain = skeletons[0].chain
    plan = plan_of(step, len(chain.vision_layers), len(chain.language_layers))
    stages = [StageModule(skeleton, part) for skeleton, part in zip(skeletons, cut(plan), strict=True)]
    for stage in stages:
        for path in (*stage.paths, *stage.chain.buffers):
            allocate(stage.model, path, CUDA)
        stage.tie()
        if step.offload:
            stage.offloading = Offloading(Transfers(CUDA), least_bytes=1)
    return stages


def batch_of(step: Step, stage: StageModule) -> MicroBatch:
    """A pack of a sample with images, one of a single token, and another one with images; or of text alone."""
    config = load_config(step.folder)
    images = [stage.family.random_images(config, units) for units in (5, 2)]
    text = torch.ones(6, dtype=torch.int64)
    nothing = images[0].grids[:0]
    shown = [(torch.cat([text, each.input_ids, text]), each.grids) for each in images]
    samples = [(text, nothing), (text[:1], nothing)] if step.text_alone else [shown[0], (text[:1], nothing), shown[1]]
    tokens = join_samples(stage.family, config, samples)
    if step.text_alone:
        images = images[1:]
        tokens = replace(tokens, grids=images[0].grids, stands_in=True)
    labels = torch.ones_like(tokens.input_ids)
    weights = torch.ones(len(labels)) if step.weighted else None
    return MicroBatch(
        pixel_values=torch.cat([each.pixels for each in images]), tokens=tokens, labels=labels, weights=weights
    )


def run(step: Step) -> dict[str, Any]:
    """Run a step; return the kernels that attention took, and the devices of gradients and optimizer states."""
    taken: list[str] = []

    def noting(*given: Any) -> kernels.Kernel:
        kernel = kernels.kernel_for(*given)
        taken.append(getattr(kernel, "__name__", ""))
        return kernel

    with (
        PretendedCuda() as device,
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(packed, "kernel_for", noting),
        FAULTS[step.fault](),
        pretended_streams(),
    ):
        stages = stages_of(step)
        batch = batch_of(step, stages[0])
        with device.refusing_waits():
            inputs, targets = base.tensors(batch, 0.5, CUDA)
            received, sent = [], []
            for stage in stages[:-1]:
                sent.append(stage(inputs))
                inputs = arrived(device, sent[-1])
                received.append(inputs[0])
            loss = stages[-1](inputs, targets)
            loss.backward()
            for (floats, _), states in zip(reversed(sent), reversed(received), strict=True):
                floats.backward(states.grad)
            optimizers = [updated(stage) for stage in stages]
    gradients = [(name, p.grad) for stage in stages for name, p in stage.named_parameters()]
    return {
        "kernels": sorted(set(taken)),
        "loss": str(loss.device),
        "devices": sorted({str(gradient.device) for _, gradient in gradients if gradient is not None}),
        "without": [name for name, gradient in gradients if gradient is None],
        "fused": all(optimizer.defaults["fused"] for optimizer in optimizers),
        "states": sorted(
            {
                str(tensor.device)
                for optimizer in optimizers
                for state in optimizer.state.values()
                for tensor in state.values()
            }
        ),
    }


def updated(stage: StageModule) -> torch.optim.AdamW:
    """Update the parameters twice: as in the first step, and as after a checkpoint was read."""
    optimizer = build_optimizer(stage, TrainingSection())
    optimizer.step()
    engine = SimpleNamespace(optimizer=SimpleNamespace())
    OptimizerState(engine, optimizer, stage).create_moments(3)
    optimizer.step()
    return optimizer


def arrived(device: PretendedCuda, sent: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the next stage has after it received the states and tokens of a pack."""
    floats, integers = sent
    buffers = {"inputs": [(floats.detach().requires_grad_(), integers)]}
    receiver = SimpleNamespace(pipe_buffers=buffers, _exec_recv_activations=lambda buffer_id: None)
    with device.allowing_waits():
        engine._receive(receiver, 0)
    return buffers["inputs"][0]


class PretendedStream:
    """A stream, or an event, that does nothing; for none of them the host can wait."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: "PretendedStream") -> None: ...

    def wait_event(self, event: "PretendedStream") -> None: ...

    def record(self) -> None: ...


@contextmanager
def pretended_streams() -> Iterator[None]:
    with (
        patch.object(torch.cuda, "Stream", PretendedStream),
        patch.object(torch.cuda, "Event", PretendedStream),
        patch.object(torch.cuda, "current_stream", PretendedStream),
        patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
    ):
        yield


# --- faults ---


def places_on_the_host() -> AbstractContextManager[Any]:
    places = features._places
    return patch.object(features, "_places", lambda chosen, device: places(chosen, torch.device("cpu")))


def in_head(change: Callable[[torch.Tensor], torch.Tensor]) -> AbstractContextManager[Any]:
    """Change the states before the head."""
    head = StageModule.head
    return patch.object(StageModule, "head", lambda self, states: head(self, change(states)))


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "places": places_on_the_host,
    "item": lambda: in_head(lambda states: states * states.norm().item()),
    "mask": lambda: in_head(lambda states: states[states[:, 0] > 0]),
    "copy": lambda: in_head(lambda states: states * torch.tensor([1.0], device=states.device)),
    "cpu": lambda: in_head(lambda states: states * states.cpu().norm()),
    "scatter": lambda: in_head(lambda states: states.masked_scatter(states.isnan(), states.flatten())),
    "nonzero": lambda: in_head(lambda states: states[torch.nonzero(states[:, 0]).flatten()]),
}


def outcome(step: Step) -> dict[str, Any] | str:
    """What `run` returns, or the error as text."""
    try:
        return run(step)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcomes(steps: Sequence[Step]) -> list[dict[str, Any] | str]:
    return [outcome(step) for step in steps]


def in_new_process(*steps: Step) -> list[dict[str, Any] | str]:
    """The outcomes in a process without a backward pass before: the first one prepares threads for known devices."""
    found: list[dict[str, Any] | str] = on_ranks(outcomes, steps, world_size=1)[0]
    return found


def copies_of_a_profile() -> tuple[Any, list[tuple[str, str, bool]]]:
    """The seconds per byte, and the different copies: from where, to where, and whether the host goes on."""
    copied: list[tuple[str, str, bool]] = []
    copy = torch.Tensor.copy_

    def noting(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append((str(source.device), str(target.device), non_blocking))
        return copy(target, source, non_blocking)

    with (
        PretendedCuda(),
        pretended_streams(),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        patch.object(torch.distributed, "barrier", lambda: None),
        patch.object(torch.Tensor, "copy_", noting),
    ):
        (timing,) = time_host(CUDA)
        return (timing.forward_seconds, timing.backward_seconds), [*dict.fromkeys(copied)]


CUDA_0 = str(CUDA)
NAMES = [name for name in plugins.names(TINY) if name != "glm4v-moe"]
"""Not GLM-4.5V: it needs float32, for which torch does not describe the product of experts without values."""
KERNELS: dict[str, tuple[str, ...]] = {"gemma3": ("one_by_one",), "paligemma": (), "text-capped": ()}
"""Of other attention than that of one call for all samples. Capped scores are computed without one."""


WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": "whole"},
    "offloaded": {"recompute": "whole", "offload": True},
    "recomputed selectively": {"recompute": "selective"},
}
"""What layers do in a step of two stages."""
STEPS = {
    f"every family, {way}": [Step(folder=name, pipeline=2, **options) for name in NAMES]
    for way, options in WAYS.items()
} | {
    "each way": [
        Step(folder=name, pipeline=2, **options)
        for name, options in zip(("internvl", "text-experts", "internvl"), WAYS.values(), strict=True)
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of a family's tiny model, which is made once."""

    @cache
    def made(name: str) -> str:
        folder = tmp_path_factory.mktemp(name)
        plugins.load(TINY, name).make(folder)
        return str(folder)

    return made


def check(found: dict[str, Any] | str, *kernels: str) -> None:
    assert not isinstance(found, str), found
    assert found.pop("kernels") == list(kernels)
    assert found == {"loss": CUDA_0, "devices": [CUDA_0], "without": [], "fused": True, "states": [CUDA_0]}


@pytest.mark.ranks
@pytest.mark.parametrize("steps", parameters(STEPS, short=("each way",)))
def test_a_step_has_its_tensors_on_the_device_and_never_waits(
    folder_of: Callable[[str], str], steps: Sequence[Step]
) -> None:
    found = in_new_process(*(replace(step, folder=folder_of(step.folder)) for step in steps))
    for step, outcome_of_step in zip(steps, found, strict=True):
        check(outcome_of_step, *KERNELS.get(step.folder, ("together",)))


@pytest.mark.ranks
@pytest.mark.parametrize("name", parameters({name: name for name in NAMES}, short=()))
def test_so_has_a_step_in_one_stage_without_images_weighted_or_in_float32(
    folder_of: Callable[[str], str], name: str
) -> None:
    folder, kernels = folder_of(name), KERNELS.get(name, ("together",))
    one, two, text, single = in_new_process(
        Step(folder=folder, weighted=True),
        Step(folder=folder, pipeline=2),
        Step(folder=folder, recompute="whole", text_alone=True),
        Step(folder=folder, dtype="float32"),
    )
    check(one, *kernels)
    check(two, *kernels)
    # Without images Gemma 3 has no blocks.
    check(text, *(kernels and ("together",)))
    if name not in EXPERTS:
        check(single, *(kernels and ("one_by_one",)))


EXPERTS = ("qwen3-vl-moe", "text-experts")
"""Models whose product of experts torch describes for bfloat16 alone, when tensors have no values."""

FOUND = {
    "places": "RuntimeError: index_copy(): self, index and source expected to be in the same device",
    "item": "HostWaits: aten::_local_scalar_dense reads from the device",
    "mask": "HostWaits: aten::index takes a mask",
    "copy": "HostWaits: aten::_to_copy copies to the device, and waits",
    "cpu": "HostWaits: aten::_to_copy copies to the CPU",
    "scatter": "HostWaits: aten::masked_scatter_backward reads from the device",
    "nonzero": "HostWaits: aten::nonzero reads from the device",
}


@pytest.mark.long
@pytest.mark.ranks
def test_a_wrong_device_and_a_waiting_host_are_found(folder_of: Callable[[str], str]) -> None:
    found = in_new_process(*(Step(folder=folder_of("internvl"), fault=fault) for fault in FOUND))
    for error, expected in zip(found, FOUND.values(), strict=True):
        assert isinstance(error, str)
        assert expected in error


@pytest.mark.ranks
def test_a_profile_times_copies_to_page_locked_memory_and_back() -> None:
    ((seconds, copies),) = on_ranks(copies_of_a_profile, world_size=1)
    assert all(per_byte > 0 for per_byte in seconds)
    assert copies == [(CUDA_0, "cpu", True), ("cpu", CUDA_0, True)]
