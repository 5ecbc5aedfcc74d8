"""Micro-batches: packs encoded and joined into tensors, in the order of the steps."""

import gc
import logging
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from trials.arrays import Ints
from trials.data.epoch import Epoch, PackPart
from trials.data.index import DatasetIndex
from trials.data.loss_weights import token_weights
from trials.data.records.sample import IGNORED, NO_GRIDS, Encoded, Encoder, Lengths
from trials.data.tokens import PackTokens
from trials.errors import DataError, TrialsError
from trials.job import LossWeighting
from trials.machine.lifeline import end_with
from trials.machine.page_locking import page_locking
from trials.machine.shared_memory import check_sockets, shared_memory
from trials.sharing.share import ALONE, Share

logger = logging.getLogger(__name__)

# A choice: far longer than a pack takes, and shorter than `COLLECTIVE_TIMEOUT`, when others fail and name no cause.
_MOST_SECONDS = 20 * 60
"""How long a rank waits for a pack of its data workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a sample of a pack is blank on one rank."""

    pack: int
    """Place of the pack among those of its data rank."""
    sample: int
    """Place of the sample in the pack."""
    sharer: int
    """Place of the rank among those that share the pack."""
    targets: int
    """Target tokens of the sample in the index."""
    reason: str
    """With file and line."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One pack as tensors."""

    pixel_values: torch.Tensor | None
    """float32 [units, *unit_shape], one zero unit that no token uses when there is none; None if not asked for."""
    tokens: PackTokens
    """Where no pixels are asked for, its grids are empty and its positions count from 0."""
    labels: torch.Tensor
    """int64 [t], shifted: entry i is the target after token i in the same sample, else -100; of the t tokens of this
    rank, which are all T unless ranks share the pack."""
    weights: torch.Tensor | None = None
    """float32 [t], the weight of each label in the loss of a step; None where it is 1 for all."""
    faults: tuple[Fault, ...] = ()
    """Those of the samples that this rank could not read; other ranks that share the pack have their own."""

    def share_memory(self) -> None:
        """Move it to shared memory. Raise SharedMemoryFull."""
        tokens = self.tokens
        every = (self.pixel_values, tokens.input_ids, tokens.positions, tokens.grids, self.labels, self.weights)
        tensors = [tensor for tensor in every if tensor is not None]
        size = sum(tensor.nbytes for tensor in tensors) / 2**20
        with shared_memory(f"for another pack of {size:.1f} MiB, of which each data worker keeps two"):
            for tensor in tensors:
                tensor.share_memory_()

    def pin_memory(self) -> "MicroBatch | MemoryError":
        """Return the micro-batch with pixels, labels and weights in page-locked memory, or why it has no room there.

        `DataLoader` calls it, in a thread whose errors would come back with their traceback as their message.
        """
        pixels, weights = self.pixel_values, self.weights
        size = sum(each.nbytes for each in (pixels, self.labels, weights) if each is not None)
        try:
            with page_locking(size, "a pack on its way to the GPU needs"):
                return replace(
                    self,
                    pixel_values=None if pixels is None else pixels.pin_memory(),
                    labels=self.labels.pin_memory(),
                    weights=None if weights is None else weights.pin_memory(),
                )
        except MemoryError as error:
            return error


def micro_batches(
    index: DatasetIndex,
    epoch: Epoch,
    steps: Sequence[int],
    data_rank: int,
    encoder: Encoder,
    *,
    pixels: bool,
    workers: int,
    on_error: Literal["skip", "fail"],
    pin: bool = False,
    weighting: LossWeighting = "token",
    within: Share = ALONE,
) -> Iterator[MicroBatch]:
    """Yield the rank's micro-batches of these steps, in order; `workers` processes prepare them ahead.

    A pack that ranks share comes to each of them, with its own part of units and labels: that of its data rank, of
    which it has the part `within`.

    With `pin` their tensors are in page-locked memory, from which a GPU copies while its host continues.

    A sample that can no longer be read, or whose lengths have changed, becomes a blank one of the lengths in the index,
    with a warning of its file and line. Under `on_error: fail` it raises DataError instead. Raise SharedMemoryFull, and
    Unwritable where workers cannot make sockets; DataError where they give nothing for long; MemoryError where there is
    no room for page-locked memory.
    """
    parts = (epoch.part(pack, data_rank) for step in steps for pack in epoch.rows(step)[:, data_rank].tolist())
    packs = [replace(part, share=part.share.divided(within)) for part in parts]
    dataset = PackDataset(index, packs, encoder, pixels=pixels, padded=epoch.packs.padded, weighting=weighting)
    # Faults come as values: raised in a worker, one would come back with the worker's traceback as its message.
    passed = _InSharedMemory(dataset) if workers else dataset
    loader = DataLoader(
        passed,
        batch_size=None,
        num_workers=workers,
        timeout=_MOST_SECONDS if workers else 0,
        worker_init_fn=_begin_work,
        pin_memory=pin,
        # The usual one would advance by a seed of the workers, and with it the dropout of the first step of a launch.
        generator=torch.Generator(),
    )
    for batch in _received_ahead(loader) if workers else loader:
        if not isinstance(batch, MicroBatch):
            # Not itself: this frame holds it, so that it would hold the frame, and with that the workers.
            raise type(batch)(*batch.args)
        if batch.faults and on_error == "fail":
            raise DataError(batch.faults[0].reason)
        for fault in batch.faults:
            logger.warning("%s; a blank sample is used instead", fault.reason)
        yield batch


def _received_ahead(loader: Iterable[MicroBatch | Exception]) -> Iterator[MicroBatch | Exception]:
    """Receive the next micro-batch from its process while the rank computes with the one before.

    Its tensors come over several connections to a process that is busy with the one after it. Raise SharedMemoryFull
    where no process can start.
    """
    with shared_memory("to start data workers"), _no_collection():
        batches = iter(loader)
    with ThreadPoolExecutor(1, thread_name_prefix="receiver") as receiver:
        coming = receiver.submit(_received, batches)
        while (batch := coming.result()) is not None:
            coming = receiver.submit(_received, batches)
            yield batch


def _received(batches: Iterator[MicroBatch | Exception]) -> MicroBatch | Exception | None:
    """Return the next one, or None after the last."""
    try:
        return next(batches, None)
    except RuntimeError as error:
        if "timed out" not in str(error):
            raise
        return DataError(
            f"data workers gave no pack for {_MOST_SECONDS / 60:g} minutes; see whether the disk of the data answers, "
            "or set data.workers: 0"
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage here, nor in processes that are forked meanwhile before they freeze what they inherit.

    A decoder that is collected ends its threads. In a forked process it would wait for ever, as that has none of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _begin_work(_worker: int) -> None:
    gc.freeze()
    gc.enable()
    for each in (signal.SIGINT, signal.SIGTERM):  # a training finishes its step after these: see `stop_requests`
        signal.signal(each, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid)


class PackDataset(Dataset[MicroBatch]):
    """Packs, given as rows of the index, and the part of each that is wanted.

    An unreadable sample becomes a blank one, and a fault of its pack.
    """

    def __init__(
        self,
        index: DatasetIndex,
        packs: Sequence[PackPart],
        encoder: Encoder,
        *,
        pixels: bool,
        padded: bool,
        weighting: LossWeighting = "token",
    ) -> None:
        self._index = index
        self._packs = packs
        self._encoder = encoder
        self._pixels = pixels
        self._padded = padded
        self._weighting = weighting

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> MicroBatch:
        part = self._packs[number]
        samples, faults = list[Encoded](), list[Fault]()
        for place, row in enumerate(part.rows.tolist()):
            try:
                samples.append(encode(self._index, row, self._encoder, pixels=self._pixels))
            except DataError as error:
                lengths = self._index.lengths(row)
                samples.append(self._encoder.blank(lengths, pixels=self._pixels))
                faults.append(
                    Fault(
                        pack=number,
                        sample=place,
                        sharer=part.share.index,
                        targets=lengths.target_tokens,
                        reason=str(error),
                    )
                )
        batch = collate(
            samples,
            self._encoder,
            pixels=self._pixels,
            padded=self._padded,
            share=part.share,
            weighting=self._weighting,
        )
        tokens = replace(batch.tokens, level=part.level)
        return replace(batch, tokens=tokens, faults=tuple(faults))


class _InSharedMemory(Dataset[MicroBatch | TrialsError]):
    """Packs in shared memory, as a worker passes them to its rank, or why one cannot be passed.

    The thread of the worker that would move them there drops those for which there is no room or no socket, and the
    rank waits for ever.
    """

    def __init__(self, packs: PackDataset) -> None:
        self._packs = packs

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> MicroBatch | TrialsError:
        try:
            batch = self._packs[number]
            check_sockets()
            batch.share_memory()
        except TrialsError as error:
            return error
        return batch


def encode(index: DatasetIndex, row: int, encoder: Encoder, *, pixels: bool) -> Encoded:
    """Return one encoded sample. Raise DataError unless it still has the lengths that the plan was made for."""
    sample = index.sample(row)
    try:
        encoded = encoder.encode(sample, pixels=pixels, kept=index.sealed(row))
    except DataError as error:
        raise DataError(f"{index.where(row)}: {error}") from error
    expected = index.lengths(row)
    found = Lengths(
        vision_units=expected.vision_units if encoded.pixel_values is None else len(encoded.pixel_values),
        text_tokens=len(encoded.input_ids),
        target_tokens=int(np.count_nonzero(encoded.labels != IGNORED)),
    )
    if found != expected:
        raise DataError(
            f"{index.where(row)}: the sample has {_told(found)} but was indexed with {_told(expected)}; "
            "its record or an image has changed, index the dataset again"
        )
    return encoded


def _told(lengths: Lengths) -> str:
    return f"{lengths.vision_units} vision units, {lengths.text_tokens} text tokens and {lengths.target_tokens} targets"


def collate(
    samples: Sequence[Encoded],
    encoder: Encoder,
    *,
    pixels: bool,
    padded: bool,
    share: Share = ALONE,
    weighting: LossWeighting = "token",
) -> MicroBatch:
    """Return a pack's samples as one micro-batch; an empty pack becomes one pad token without a target.

    With `padded` each sample is filled up to the longest, so that T is a multiple of it. Units, labels and weights are
    those of `share`; pad tokens, as a sample of their own, make T a multiple of its degree.
    """
    if not samples:
        # An empty pack makes the number of packs a multiple of the data ranks; its rank runs the step like the others.
        samples = [_padding(encoder, 1, pixels=pixels)]
    lengths = [len(sample.input_ids) for sample in samples]
    widths = [max(lengths)] * len(samples) if padded else lengths
    if missing := -sum(widths) % share.degree:
        samples, widths = [*samples, _padding(encoder, missing, pixels=pixels)], [*widths, missing]
    input_ids = [
        _filled(sample.input_ids, width, encoder.pad_token_id) for sample, width in zip(samples, widths, strict=True)
    ]
    # Shifted inside each sample: its last token must not predict the next sample's first.
    labels = [_filled(sample.labels[1:], width, IGNORED) for sample, width in zip(samples, widths, strict=True)]
    shown, grids = _shown(samples, encoder, share)
    stands_in = pixels and not len(shown)
    if stands_in:
        # A tower cannot run on no unit, so that a pack without images carries one of zeros.
        blank = encoder.blank(Lengths(vision_units=1, text_tokens=1, target_tokens=0), pixels=True)
        shown, grids = _shown([blank], encoder, ALONE)
    tokens = PackTokens(
        input_ids=torch.from_numpy(np.concatenate(input_ids)),
        positions=torch.from_numpy(
            np.concatenate(
                [_extended(sample.positions, width) for sample, width in zip(samples, widths, strict=True)], 1
            )
        ),
        lengths=tuple(widths),
        grids=torch.from_numpy(grids),
        stands_in=stands_in,
    )
    own = share.part(sum(widths))
    return MicroBatch(
        pixel_values=torch.from_numpy(shown) if pixels else None,
        tokens=tokens,
        labels=torch.from_numpy(np.concatenate(labels))[own],
        weights=None if weighting == "token" else torch.from_numpy(_weights(labels, weighting))[own],
    )


def _weights(labels: Sequence[Ints], weighting: LossWeighting) -> NDArray[np.float32]:
    """Return the weight of each label of a pack's samples, [T]: by all targets of its sample, whichever rank has it."""
    targets = np.array([np.count_nonzero(of_sample != IGNORED) for of_sample in labels], dtype=np.int64)
    return np.repeat(token_weights(targets, weighting), [*map(len, labels)]).astype(np.float32)


def _padding(encoder: Encoder, tokens: int, *, pixels: bool) -> Encoded:
    return encoder.blank(Lengths(vision_units=0, text_tokens=tokens, target_tokens=0), pixels=pixels)


def _shown(samples: Sequence[Encoded], encoder: Encoder, share: Share) -> tuple[NDArray[np.float32], Ints]:
    """Return the pixels [units, *unit_shape] and grids [images, G] that belong to `share`."""
    nothing = np.zeros((0, *encoder.unit_shape), dtype=np.float32)
    units = np.concatenate([each.pixel_values for each in samples if each.pixel_values is not None] or [nothing])
    grids = np.concatenate([each.grids for each in samples if len(each.grids)] or [NO_GRIDS])
    if share.degree == 1 or not len(units):
        return units, grids
    sizes = encoder.pieces(len(units), grids)
    own = share.pieces(sizes)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    # A copy: a view would hold the pixels of the whole pack.
    return units[ends[own.start] : ends[own.stop]].copy(), grids[own] if len(grids) else grids


def _filled(values: Ints, width: int, filler: int) -> Ints:
    # np.pad takes ten times as long.
    filled = np.full(width, filler, dtype=values.dtype)
    filled[: len(values)] = values
    return filled


def _extended(positions: Ints, width: int) -> Ints:
    """Repeat the last of `positions` [P, tokens] for the padding behind them.

    Higher ones would change a sample whose rotary frequencies depend on its highest position.
    """
    missing = width - positions.shape[1]
    return np.pad(positions, ((0, 0), (0, missing)), mode="edge") if missing else positions
