"""Ranks that serve one plan after another: what they keep, and that their results do not change."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.workload import Prepared
from tests.values.parameters import parameters
from tests.values.training import PACKED, plan_of, prepared_of
from trials.channels.folder import FolderChannel
from trials.launchers.local import LocalLauncher
from trials.plan import Padded, Plan
from trials.run.pool import REQUESTS_PER_START, Answers, WarmPool
from trials.tasks.answer import TrialReport, read_report
from trials.tasks.footprint import Footprint
from trials.tasks.request import Trial

pytestmark = pytest.mark.ranks

_log = logging.getLogger(__name__)

ROUNDING = 1e-5
"""The last bits of a product depend on where its memory lies."""
SHORT = Trial(warmup_steps=(), timed_steps=(1, 2))
PIPELINE, DATA = plan_of("3+0r2,0", "1+2"), plan_of("4+2", data=2, zero=1)
PLANS = (
    PIPELINE,
    DATA,
    plan_of("4+1", "0+1r0,1"),
    plan_of("4+2r2,0", data=2),
    plan_of("3+0r3,0", "1+2r1,2", packing=Padded(samples=4)),
    plan_of("4+2", data=2, zero=2, packing=Padded(samples=4)),
    plan_of("4+2r2,0", data=2, packing=replace(PACKED, sequence=2)),
    plan_of("4+2r2,1", tensor=2, zero=1),
)


@pytest.fixture(scope="module")
def prepared(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_of(shallow, tmp_path_factory.mktemp("job"))


def reports(answer: object) -> list[TrialReport]:
    assert isinstance(answer, Answers), answer
    return [report for report in answer.reports if isinstance(report, TrialReport)]


def footprints(folder: Path) -> list[list[Footprint]]:
    """Return the footprints of both ranks for each request."""
    requests = sorted(folder.glob("request-*"), key=lambda path: int(path.name.split("-")[1]))
    answers = [[read_report(FolderChannel(request), rank) for rank in range(2)] for request in requests]
    return [[answer.footprint for answer in both if answer is not None] for both in answers]


@pytest.mark.parametrize(
    "plans", parameters({"a few": ((*PLANS[:2], *PLANS[5:7]),), "all": (PLANS,)}, short=("a few",))
)
def test_plans_of_all_layouts_leave_nothing_behind_on_warm_ranks(
    plans: Sequence[Plan], prepared: Prepared, tmp_path: Path
) -> None:
    with WarmPool(LocalLauncher(tmp_path, 2, "cpu")) as pool:
        losses = [reports(pool.ask(prepared.request(plan, SHORT), 120))[0].losses for plan in (*plans, PIPELINE, DATA)]
    assert np.array(losses[:2]) == pytest.approx(np.array(losses[-2:]), rel=ROUNDING)
    held = [[(rank.descriptors, rank.threads) for rank in both] for both in footprints(tmp_path)]
    assert len(held) == len(plans) + 2
    assert held == [held[0]] * len(held)
    assert all(rank.resident_bytes > 100 << 20 for both in footprints(tmp_path) for rank in both)


@pytest.mark.long
def test_warm_and_fresh_ranks_give_the_same_losses(
    prepared: Prepared, pool: WarmPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step times are only logged (`--log-cli-level=info`), because other load changes them."""
    caplog.set_level(logging.INFO, logger=__name__)
    pool.ask(prepared.request(PLANS[2], SHORT), 120)
    losses = []
    with WarmPool(LocalLauncher(tmp_path, 2, "cpu"), REQUESTS_PER_START["fresh"]) as fresh:
        for name, ranks in (("warm", pool), ("fresh", fresh)):
            answered = reports(ranks.ask(prepared.request(DATA, SHORT), 120))
            losses.append([report.losses for report in answered])
            _log.info("%s ranks: steps took %s s", name, [report.step_seconds for report in answered])
    assert np.array(losses[0]) == pytest.approx(np.array(losses[1]), rel=ROUNDING)
