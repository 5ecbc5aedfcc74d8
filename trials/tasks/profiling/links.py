"""Speed of messages to the next stage and of averages over data ranks, in every layout, and of copies to the host."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import distributed

from trials.engine.gradients.node_reduction import NodeReduction
from trials.grid import Grid
from trials.offload.transfers import Transfers
from trials.tasks.answer import CommunicationTiming, ExchangeTiming
from trials.tasks.profiling.overlap import Overlap
from trials.tasks.profiling.pace import LEAST_BYTES, Pace, begun_together, ladder, now, slope

# Choices: of 1 KiB the latency is nearly all, and 4 MiB are about the states of a pack.
_SMALL_BYTES = 1 << 10
_LARGE_BYTES = 4 << 20
_MESSAGES = 3
"""DeepSpeed sends the shapes of a pack's tensors, its states, and its ids (`PipelineEngine._exec_send_activations`)."""
# A choice: latency is a small part of it. On slow links smaller sizes are timed (`Pace`).
_REDUCED_BYTES = 8 << 20
_EXCHANGES = 20
"""More than layers are repeated: messages are short, and anything else that runs on the machine makes them late."""

# Choices: about what a layer keeps of a pack, so that the start of a copy does not count.
_COPIED_BYTES = 64 << 20
_COPIES = 9


def layouts_of_all() -> Iterator[Grid]:
    """Yield every pipeline x data of all ranks, from one stage on."""
    ranks = distributed.get_world_size()
    for pipeline in range(1, ranks + 1):
        if ranks % pipeline == 0:
            yield Grid(pipeline=pipeline, data=ranks // pipeline)


def time_messages(grid: Grid, overlap: Overlap, device: torch.device, pace: Pace) -> CommunicationTiming:
    """Time messages to the next stage while all ranks of a layout send, as in a training. Every rank must call it.

    `overlap` is what averages in this layout save during passes.
    """
    latency, per_byte = _time_links(grid, device, pace)
    return CommunicationTiming(
        pipeline=grid.pipeline,
        data=grid.data,
        latency_seconds=latency,
        seconds_per_byte=per_byte,
        bucket_bytes=overlap.bucket_bytes,
        hidden_share=overlap.hidden_share,
    )


def _time_links(grid: Grid, device: torch.device, pace: Pace) -> tuple[float, float]:
    """Return (seconds before the first byte of a pack's states, seconds per byte) to the next stage; 0 on the last.

    Every second stage exchanges messages with the next one, there and back, since clocks of two ranks differ; then the
    others do.
    """
    rank = distributed.get_rank()
    stage = grid.coordinates(rank).stage
    what, sizes = f"messages of {grid.pipeline} stages", (_SMALL_BYTES, *ladder(_LARGE_BYTES, LEAST_BYTES))
    found = (0.0, 0.0)
    for turn in range(min(2, grid.pipeline - 1)):
        distributed.barrier()
        is_first = stage % 2 == turn
        other = rank + grid.data if is_first else rank - grid.data
        neighbour = other if 0 <= other < grid.world_size else None
        exchange = partial(_there_and_back, neighbour, device, is_first=is_first)
        points = pace.points(what, sizes, exchange, _EXCHANGES, min)
        if is_first and neighbour is not None:
            found = points[0][1], slope(points)
    distributed.barrier()
    return found


def _there_and_back(other: int | None, device: torch.device, size: int, *, is_first: bool) -> Callable[[], float]:
    """Return the exchange of a pack's messages, the last one of `size` bytes, which returns the seconds of one way.

    Without another rank nothing is exchanged.
    """
    if other is None:
        return lambda: 0.0
    messages = [torch.zeros(_SMALL_BYTES // 4, device=device) for _ in range(_MESSAGES - 1)]
    messages.append(torch.zeros(size // 4, device=device))
    turns = (distributed.send, distributed.recv) if is_first else (distributed.recv, distributed.send)

    def exchange() -> float:
        start = now(device)
        for transfer in turns:
            for message in messages:
                transfer(message, other)
        return (now(device) - start) / 2

    return exchange


def time_averages(grid: Grid, of_node: int, device: torch.device, repeats: int, pace: Pace) -> Iterator[ExchangeTiming]:
    """Time averages of gradients over the data ranks of each stage, all stages at once. Every rank must take all.

    Where data ranks can average on each node of `of_node` ranks first, this is timed as well.
    """
    if grid.data == 1:
        return
    own = grid.coordinates(distributed.get_rank()).stage
    # Every rank must create every group, in the same order.
    groups = [distributed.new_group(list(grid.stage_ranks(stage))) for stage in range(grid.pipeline)]
    what = f"averaging of gradients over {grid.data} data ranks"
    at_once = partial(distributed.all_reduce, group=groups[own])
    average = ExchangeTiming(
        name="average",
        ranks=grid.data,
        pipeline=grid.pipeline,
        backward_seconds=_seconds_per_byte(what, at_once, device, repeats, pace),
    )
    distributed.barrier()
    distributed.destroy_process_group(groups[own])
    yield average
    if (within := grid.data_ranks_of_node(of_node)) > 1:
        reduction = NodeReduction(grid, within)
        what = f"{what}, first {within} of a node"
        seconds = _seconds_per_byte(what, reduction.add_up, device, repeats, pace)
        distributed.barrier()
        reduction.close()
        yield replace(average, within=within, backward_seconds=seconds)


def _seconds_per_byte(
    what: str, add_up: Callable[[torch.Tensor], object], device: torch.device, repeats: int, pace: Pace
) -> float:
    def reduction(size: int) -> Callable[[], float]:
        gradients = torch.zeros(size // 4, device=device)
        return begun_together(lambda: add_up(gradients), device)

    points = pace.points(what, ladder(_REDUCED_BYTES, LEAST_BYTES), reduction, repeats, statistics.median)
    return slope(((0, 0.0), *points))


def time_host(device: torch.device) -> tuple[ExchangeTiming, ...]:
    """Time copies to the host (in the forward pass) and back (in the backward pass) while all ranks copy.

    Nothing for a CPU, whose memory is the host's. Every rank must call it.
    """
    if device.type != "cuda":
        return ()
    there, here = (
        torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device),
        Transfers(device).host_bytes(_COPIED_BYTES),
    )

    def seconds_per_byte(target: torch.Tensor, source: torch.Tensor) -> float:
        copy = begun_together(lambda: target.copy_(source, non_blocking=True), device)
        copy()
        return statistics.median(copy() for _ in range(_COPIES)) / _COPIED_BYTES

    out, back = seconds_per_byte(here, there), seconds_per_byte(there, here)
    return (ExchangeTiming(name="copy", ranks=1, forward_seconds=out, backward_seconds=back),)
