"""Updates that ranks time after links whose averages of gradients seem to take all of the time, and more."""

import os
from functools import partial
from pathlib import Path

from trials import wire
from trials.engine.group import process_group
from trials.tasks.answer import UpdateTiming
from trials.tasks.profiling.one_of_each import one_of_each
from trials.tasks.profiling.pace import Pace
from trials.tasks.profiling.updates import ExchangeRates, time_updates
from trials.tasks.request import Profile, Request

_SLOW = 1e-6
"""Seconds per byte: more than any update takes here, and less than would keep it from running."""


def behind_a_slow_link(file: Path) -> tuple[UpdateTiming, ...]:
    """Return the timings for a request to profile."""
    request = wire.decode(Request, file.read_text())
    assert isinstance(request.task, Profile)
    rank = int(os.environ["RANK"])
    with process_group(rank, rank, request.plan.layout.world_size, f"file://{file}.rendezvous") as device:
        build = partial(one_of_each, request.job.model, request.job.training, device)
        rates = ExchangeRates(reduction=_SLOW, gathering=0.0)
        return time_updates(request, request.task, build, rates, Pace.of(10_000.0, device))
