"""Calls inside layers that the device computes slowly although it has a faster way: convolutions and attention.

A convolution is also a product of its patches with its weight, of the same numbers, which libraries run many times
faster in some cases (pytorch#174051). Attention without a fused kernel holds all scores in memory.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trials.costs.coefficients import NOTHING, Coefficients, LayerKind, SlowCall, SlowCause, added
from trials.engine.stopwatch import Stopwatch
from trials.tasks.profiling.probes import Probe

Function: TypeAlias = Callable[..., torch.Tensor]
Options: TypeAlias = Mapping[str, Any]
"""Arguments by their names."""

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_OF_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# A choice: above the spread at which repeats count as noisy (`NOISE_LIMIT`).
_CLEARLY_FASTER = 1.25
"""Times by which a call must be slower than the other way: below that, repeats of one and the same differ."""
# A choice: the least of three, after a warm-up, leaves out a disturbed one; a profile tries many calls.
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call inside a layer."""

    function: Function
    options: Options


class Calls(TorchFunctionMode):
    """The convolutions, and the attention of torch, that are called inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Call] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = _OF_ATTENTION if func is scaled_dot_product_attention else _OF_CONVOLUTION
        if func is scaled_dot_product_attention or func in _CONVOLUTIONS:
            options = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.noted.append(Call(function=func, options=_leaves(options)))
        return func(*args, **(kwargs or {}))


def time_slow_calls(
    probes: Iterable[Probe], run: Callable[[Probe], object], device: torch.device
) -> tuple[SlowCall, ...]:
    """Return `LayerCosts.slow_calls` of these probes, which `run` runs forward."""
    found: dict[tuple[LayerKind, SlowCause], tuple[Coefficients, Coefficients]] = {}
    for probe in probes:
        with Calls() as calls:
            run(probe)
        slow: dict[SlowCause, list[tuple[float, float]]] = {}
        for call in calls.noted:
            if (other := faster_way(call)) is not None:
                cause, way = other
                with suppress(torch.OutOfMemoryError):  # a faster way for which there is no room is none
                    slow.setdefault(cause, []).append((_seconds(call, device), _seconds(way, device)))
        for cause, timed in slow.items():
            if not timed:
                continue
            seconds, faster = (sum(side) for side in zip(*timed, strict=True))
            if seconds > _CLEARLY_FASTER * faster:
                slower, fast = found.get((probe.layer, cause), (NOTHING, NOTHING))
                # Of layers that differ, the mean of the tower.
                found[probe.layer, cause] = (
                    added(slower, _per_size(probe, cause, probe.share * seconds)),
                    added(fast, _per_size(probe, cause, probe.share * faster)),
                )
    return tuple((*of, *sizes) for of, sizes in found.items())


def faster_way(call: Call) -> tuple[SlowCause, Call] | None:
    """Return what may make a call slow, with a call that it does not; None for attention with a fused kernel.

    Of attention that is a single change with which torch chooses a fused kernel, and None where none has one.
    """
    if call.function is not scaled_dot_product_attention:
        return "convolution", Call(function=product, options=call.options)
    if _is_fused(call.options):
        return None
    for cause, change in _CHANGES.items():
        if _is_fused(options := _leaves(change(call.options))):
            return cause, Call(function=call.function, options=options)
    return None


def product(  # noqa: PLR0917 (torch's arguments)
    input: torch.Tensor,  # noqa: A002 (torch's name)
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Return what torch's convolution does of [N, channels, *sides] or [channels, *sides], as a product of patches."""
    if input.dim() < weight.dim():
        return product(input[None], weight, bias, stride, padding, dilation, groups)[0]
    sizes = weight.shape[2:]
    steps, gaps = _of_each(stride, len(sizes)), _of_each(dilation, len(sizes))
    spans = [gap * (size - 1) for gap, size in zip(gaps, sizes, strict=True)]
    patches = pad(input, [side for sides in reversed(_padded(padding, spans)) for side in sides])
    for axis, (span, step, gap) in enumerate(zip(spans, steps, gaps, strict=True)):
        patches = patches.unfold(2 + axis, span + 1, step)[..., ::gap]
    patches = patches.movedim(1, len(sizes) + 1).flatten(len(sizes) + 1).unflatten(-1, (groups, -1))
    states = torch.einsum("...gk,gok->...go", patches, weight.flatten(1).unflatten(0, (groups, -1))).flatten(-2)
    return (states if bias is None else states + bias).movedim(-1, 1)


def _of_each(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _padded(padding: int | tuple[int, ...] | str, spans: list[int]) -> list[tuple[int, int]]:
    """Return the zeros (before, behind) each side."""
    if padding == "same":
        return [(span // 2, span - span // 2) for span in spans]
    of_sides = (0,) if isinstance(padding, str) else padding
    return [(side, side) for side in _of_each(of_sides, len(spans))]


def _is_fused(options: Options) -> bool:
    # What torch's own function asks, too (aten/src/ATen/native/transformers/attention.cpp).
    choice: int = torch._fused_sdp_choice(**options)
    return choice not in (SDPBackend.MATH.value, SDPBackend.ERROR.value)


_CHANGES: Mapping[SlowCause, Callable[[Options], Options]] = {
    "dropout": lambda given: {**given, "dropout_p": 0.0},
    "dtype": lambda given: {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    },
    "mask": lambda given: {**given, "attn_mask": None},
    "widths": lambda given: {
        **given,
        "value": pad(given["value"], (0, given["query"].shape[-1] - given["value"].shape[-1])),
    },
}


def _leaves(options: Options) -> Options:
    """Return the options with the same tensors outside of any graph."""
    return {
        name: value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


def _seconds(call: Call, device: torch.device) -> float:
    """Return the seconds of both passes of a call, the least of some repeats."""
    stopwatch, seconds = Stopwatch(device), []
    for _ in range(1 + _REPEATS):
        with stopwatch.section("call"):
            output = call.function(**call.options)
            if output.requires_grad:
                output.backward(torch.ones_like(output))
        seconds.append(stopwatch.read()["call"])
    return min(seconds[1:])


def _per_size(probe: Probe, cause: SlowCause, seconds: float) -> Coefficients:
    """Return the seconds as coefficients like those of `LayerCost`."""
    if probe.layer != "language":
        return (seconds / probe.units, 0.0, 0.0, 0.0)
    if cause == "convolution":
        return (0.0, seconds / probe.tokens, 0.0, 0.0)
    return (0.0, 0.0, seconds / probe.squares, 0.0)
