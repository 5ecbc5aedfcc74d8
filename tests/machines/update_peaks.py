"""Bytes that a rank needs in the parts of a step, without those of AdamW itself."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from tests.machines.built_stages import HeldTensors
from trials import wire
from trials.engine import configuration
from trials.engine.base import BACKWARD, OPTIMIZER
from trials.engine.gradients import messages
from trials.engine.group import process_group
from trials.engine.stopwatch import Stopwatch
from trials.tasks.request import Request
from trials.tasks.session import open_session


class _PeakProbe(Stopwatch):
    def __init__(self, tensors: HeldTensors) -> None:
        super().__init__(torch.device("cpu"))
        self._tensors = tensors
        self.peaks: dict[str, int] = {}
        """Most bytes in each section, update beyond what is held before."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        before = self._tensors.peak_bytes = self._tensors.held_bytes
        with super().section(name):
            yield
        held = before if name == OPTIMIZER else 0
        self.peaks[name] = max(self.peaks.get(name, 0), self._tensors.peak_bytes - held)


def peaks_of_step(files: Sequence[Path], bucket: int) -> list[tuple[int, int]]:
    """Return (most bytes in a backward pass, further bytes in the update) of each request, with buckets of this size.

    AdamW does nothing: on CUDA it is one kernel, which needs no further memory, as it does on a CPU.
    """
    with (
        patch.object(messages, "BUCKET", bucket),
        patch.object(configuration, "BUCKET", bucket),
        patch.object(torch.optim.AdamW, "step", lambda *_: None),
    ):
        return [_peaks_of_step(file) for file in files]


def _peaks_of_step(file: Path) -> tuple[int, int]:
    request = wire.decode(Request, file.read_text())
    rank, ranks = int(os.environ["RANK"]), request.plan.layout.world_size
    with (
        process_group(rank, rank, ranks, f"file://{file}.rendezvous") as device,
        HeldTensors() as tensors,
        open_session(request, rank, device) as session,
    ):
        probe = _PeakProbe(tensors)
        session.engine.stopwatch = probe
        epoch = session.epoch(0)
        with closing(session.batches(epoch, [0])) as batches:
            session.step(batches, epoch.step(0))
        return probe.peaks[BACKWARD], probe.peaks[OPTIMIZER]
