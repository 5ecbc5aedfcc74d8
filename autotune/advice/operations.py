"""Layers without values: the operations of their passes, the bytes that they move and keep, and the time of both."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autotune.advice.data_sheets import DataSheet
from trials.costs.coefficients import LayerKind
from trials.engine.stopwatch import Stopwatch
from trials.stage import TOWERS
from trials.tasks.answer import LayerTiming
from trials.tasks.profiling.layer_profile import Profiler
from trials.tasks.profiling.one_of_each import OneOfEach
from trials.tasks.profiling.probes import Probe, ProbeBytes

META = torch.device("meta")
# Choices: what large products, elementwise kernels and long messages usually reach of a data sheet.
PRODUCT_SHARE, MEMORY_SHARE, LINK_SHARE = 0.6, 0.8, 0.8
HOST_SECONDS = 2e-3
"""A choice: what the host takes to launch both passes of a layer. docs/benchmarks/gpu.md has 2 to 4 ms with an H200."""

_FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_")
"""Operations that read and write no values."""
_CHOOSING = ("embedding", "index", "index_select", "gather")
"""Operations that read no more of their first input than they write."""
_BACKWARD_PRODUCTS = 2.5
"""Products of FlashAttention's backward pass over those of its forward pass: five, with the scores again, for two."""

_Maker: TypeAlias = Callable[[], Any]


class SheetProfiler(Profiler):
    """Profiler of layers on torch's meta device: bytes are exact, and times those of a data sheet."""

    def __init__(self, stage: OneOfEach, takes_gradient: dict[LayerKind, bool], sheet: DataSheet) -> None:
        super().__init__(stage, takes_gradient, META, repeats=1)
        self._stopwatch: _SheetStopwatch = _SheetStopwatch(sheet)

    def warm_up(self, probes: Iterable[Probe]) -> None:
        """Run one probe of each layer, which allocates gradients: later ones are added to these."""
        of_layers: dict[tuple[LayerKind, int], Probe] = {}
        for probe in probes:
            if of_layers.setdefault((probe.layer, probe.number), probe) is probe:
                self._pass(probe, probe.run, None)

    def timings(self, probes: Sequence[Probe]) -> tuple[LayerTiming, ...]:
        """Return timings in which the host takes `HOST_SECONDS` for each layer of a tower."""
        return tuple(
            replace(timing, host_seconds=HOST_SECONDS) if timing.layer in TOWERS else timing
            for timing in super().timings(probes)
        )

    def sizes(self, probe: Probe) -> ProbeBytes:
        with self._stopwatch.clock, _fused_attention(self._stopwatch.clock):
            return super().sizes(probe)


class _SheetStopwatch(Stopwatch):
    """Stopwatch of what runs on torch's meta device."""

    def __init__(self, sheet: DataSheet) -> None:
        super().__init__(META)
        self.clock = RooflineClock(sheet)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.clock.seconds = 0.0  # a difference of two times would be rounded by what ran before
        with self.clock, _fused_attention(self.clock):
            yield
        self._seconds[name] += self.clock.seconds


class RooflineClock(TorchDispatchMode):
    """Adds up the time of operations: each takes as long as its products, or as its bytes, whichever take longer.

    That is the roofline model (Williams, Waterman and Patterson 2009) of each operation. Without values, shapes decide
    what an operation takes and gives. Layers repeat few of them many times, so that it is computed once for equal ones.
    """

    def __init__(self, sheet: DataSheet) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sheet, self.seconds = sheet, 0.0
        self._known: dict[Hashable, tuple[float, _Maker | None]] = {}
        """Seconds of operations with their inputs, and what makes their outputs, where it is not torch alone."""

    def add(self, operations: float, moved: float, element_bytes: int) -> None:
        self.seconds += self._roofline(operations, moved, element_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._opname in _FREE:
            return func(*args, **(kwargs or {}))
        key = func, _described(args), _described(kwargs)
        seconds, make = self._known.get(key, (None, None))
        found = make() if make else func(*args, **(kwargs or {}))
        if seconds is None:
            seconds, make = self._known[key] = self._computed(func, args, kwargs or {}, found)
        self.seconds += seconds
        return found

    def _computed(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any
    ) -> tuple[float, _Maker | None]:
        """Return the seconds of an operation, and what makes its outputs again if they have memory of their own."""
        read, written = list(_on_device((args, kwargs))), list(_on_device(found))
        if not written:
            return 0.0, None
        given, made = ({tensor.untyped_storage()._cdata for tensor in each} for each in (read, written))
        if made <= given and not func._schema.is_mutable:
            return 0.0, None
        count = flop_registry.get(func._overloadpacket)
        operations = count(*args, **kwargs, out_val=found) if count else 0
        moved = sum(map(_size, written))
        moved += moved if func._opname in _CHOOSING else sum(map(_size, read))
        seconds = self._roofline(operations, moved, written[0].element_size())
        has_own = len(made) == len(written) and made.isdisjoint(given)
        return seconds, _maker(found) if has_own else None

    def _roofline(self, operations: float, moved: float, element_bytes: int) -> float:
        products = operations / (PRODUCT_SHARE * self._sheet.rate(element_bytes))
        return max(products, moved / (MEMORY_SHARE * self._sheet.memory_bytes_per_second))


def _described(value: Any) -> Hashable:
    """Return what of an input decides what an operation takes and gives: of values, what equals nothing else."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            return object()
        return value.dtype, value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
    if isinstance(value, list | tuple):
        return tuple([_described(each) for each in value])
    if isinstance(value, dict):
        return tuple([(name, _described(each)) for name, each in value.items()])
    return type(value), value  # 1, 1.0 and True are equal, but not what comes of them


def _maker(found: Any) -> _Maker | None:
    """Return what makes new tensors like these; None where something else is among them."""
    if isinstance(found, tuple):
        makers = [_maker(each) for each in found]
        return None if None in makers else lambda: tuple([make() for make in makers if make])
    if not isinstance(found, torch.Tensor) or not found.is_meta:
        return None
    make = partial(torch.empty_strided, found.shape, found.stride(), dtype=found.dtype, device=META)
    # The storage may be larger than the tensor.
    return make if _described(make()) == _described(found) else None


@contextmanager
def _fused_attention(clock: "RooflineClock") -> Iterator[None]:
    """Compute attention of meta tensors without keeping scores, as the kernels of devices do."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        _: float = 0.0,
        is_causal: bool = False,
        **__: Any,
    ) -> Any:
        # Kernels convert a mask to the type of the query.
        mask = None if attn_mask is None else query.new_empty(attn_mask.shape)
        return _Attention.apply(query, key, value, mask, (clock, 0.5 if is_causal else 1.0))  # type: ignore[no-untyped-call]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attend, "AutogradMeta")
        yield


class _Attention(torch.autograd.Function):
    """FlashAttention without values (Dao 2023): keeps its inputs, its output, and a number for each row of scores."""

    @staticmethod
    def forward(  # noqa: PLR0917 (torch gives them so)
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        given: tuple[RooflineClock, float],
    ) -> torch.Tensor:
        """`given` is the clock, and the share of scores that count."""
        # In memory heads are next to each other, so that what follows needs no copy.
        output = query.new_empty((*query.transpose(-3, -2).shape[:-1], value.shape[-1])).transpose(-3, -2)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows, mask)
        ctx.clock, share = given
        # Two products for each pair of a row and a column (Megatron-LM, appendix).
        ctx.operations = share * 2 * rows.numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        ctx.clock.add(ctx.operations, sum(map(_size, (query, key, value, output))), query.element_size())
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, output, *_ = ctx.saved_tensors
        moved = 2 * sum(map(_size, (query, key, value, output)))
        ctx.clock.add(_BACKWARD_PRODUCTS * ctx.operations, moved, gradient.element_size())
        return *map(torch.empty_like, (query, key, value)), None, None


def _on_device(values: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.device == META)


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, of which expanded ones repeat those of their storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
