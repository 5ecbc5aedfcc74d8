"""The profile of a head whose logits of large packs are computed in chunks predicts the peaks of packs of any size."""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from autotune.prediction.columns import TARGETS
from autotune.prediction.fit.costs import fit_costs
from autotune.prediction.predictor import Predictor
from tests.machines.own_ranks import on_ranks
from tests.values.reports import reports_of
from tests.values.search import COSTS
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.engine.group import process_group
from trials.model.ends import head_loss
from trials.model.skeleton import load_config
from trials.plan import Packed, Padded
from trials.tasks.answer import ProfileReport
from trials.tasks.profiling.layer_profile import run_profile
from trials.tasks.request import ProbeSizes, Profile, Request, Training
from trials.tasks.session import open_session

pytestmark = pytest.mark.ranks

MOST = 300
"""Targets whose logits are held at once."""
TASK = Profile(
    sizes=ProbeSizes(unit_counts=(1, 2, 4), sample_shapes=((1, 80), (1, 320), (4, 80), (1, 800), (8, 80), (16, 80))),
    curve_sizes=ProbeSizes(unit_counts=(), sample_shapes=()),
    curve_spread=-1.0,
    zero_stages=(),
    exchange_seconds=None,
    repeats=1,
    of_node=1,
)
PLANS = [
    plan_of("4+2", packing=Padded(samples=1)),
    plan_of("4+2", packing=Packed(qv=30, qt=1500, qv_min=30, qt_min=1400)),
    plan_of("4+2r4,2", packing=Padded(samples=8)),
]


def test_packs_on_both_sides_of_the_step_are_predicted(shallow: Path, tmp_path: Path) -> None:
    prepared, files = prepared_of(shallow, tmp_path / "work"), []
    for number, plan in enumerate(PLANS):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(wire.encode(prepared.request(plan, Training(output=tmp_path))))
    ((document, peaks),) = on_ranks(profile_and_peaks, files, world_size=1)
    report, (known,) = wire.decode(ProfileReport, document), reports_of(COSTS, noise=0.0, ranks=1)
    costs = fit_costs([replace(report, updates=known.updates, communications=known.communications)])
    assert max(costs[kind].bytes_error for kind, _ in costs.layers) < 0.01
    predictor = Predictor(costs, prepared.epoch, element_bytes=4)
    targets = [predictor.sizes(plan.packing, plan.layout).table[:, TARGETS].max() for plan in PLANS]
    assert targets[0] < MOST < min(targets[1:])
    for plan, peak in zip(PLANS, peaks, strict=True):
        (stage,) = predictor.predict(plan).stage_memory
        assert stage.expected == pytest.approx(peak, rel=0.01)
        assert stage.low <= peak <= stage.high < 1.05 * peak


def profile_and_peaks(files: Sequence[Path]) -> tuple[str, list[int]]:
    """Return a profile, and the peak bytes of an epoch of each request, on the rank that this process is."""
    rank, peaks = int(os.environ["RANK"]), []
    requests = [wire.decode(Request, file.read_text()) for file in files]
    words = load_config(requests[0].job.model.path).get_text_config().vocab_size
    with patch.object(head_loss, "_LOGITS_BYTES", MOST * words * 4):
        profile = run_profile(requests[0], TASK, torch.device("cpu"))
        for file, request in zip(files, requests, strict=True):
            with (
                process_group(rank, rank, 1, f"file://{file}.rendezvous") as device,
                open_session(request, rank, device) as session,
            ):
                epoch = session.epoch(0)
                with closing(session.batches(epoch, range(epoch.steps))) as batches:
                    for number in range(epoch.steps):
                        session.step(batches, epoch.step(number))
                peaks.append(session.meter.peak_bytes)
    return wire.encode(profile), peaks
