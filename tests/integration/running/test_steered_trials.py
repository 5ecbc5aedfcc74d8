"""Trials that the agent ends early."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.workload import Prepared
from tests.programs.processes import children, wait_for
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial

pytestmark = pytest.mark.ranks

PIPELINE = plan_of("3+0r2,0", "1+2")
DATA = plan_of("4+2", data=2, zero=1)
SIX = Trial(warmup_steps=(0,), timed_steps=(1, 2, 3, 4, 5, 1))
WAIT_SECONDS = 1.0


@pytest.fixture(scope="module")
def prepared(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_of(shallow, tmp_path_factory.mktemp("job"))


class Agent:
    """Receives steps, and ends the trial after some of them."""

    def __init__(self, enough: int) -> None:
        self.heard: list[float] = []
        self._enough = enough

    def __call__(self, seconds: float) -> bool:
        self.heard.append(seconds)
        return len(self.heard) < self._enough


def reports(answer: object) -> list[TrialReport]:
    assert isinstance(answer, Answers), answer
    return [report for report in answer.reports if isinstance(report, TrialReport)]


@pytest.mark.parametrize("plan", parameters({"pipeline": PIPELINE, "data": DATA}, short=("data",)))
def test_an_early_end_stops_all_ranks_at_the_same_step_and_they_serve_the_next_trial(
    plan: Plan, prepared: Prepared, pool: WarmPool
) -> None:
    agent = Agent(enough=2)
    ended = reports(pool.ask(prepared.request(plan, SIX), 120, on_step=agent))
    assert len(agent.heard) == 2
    assert tuple(agent.heard) == ended[0].step_seconds
    short = replace(SIX, timed_steps=SIX.timed_steps[:2])
    planned = reports(pool.ask(prepared.request(plan, short), 120))
    for early, whole in zip(ended, planned, strict=True):
        assert len(early.step_seconds) == len(whole.step_seconds) == 2
        assert early.losses == pytest.approx(whole.losses, rel=1e-5)
        assert (early.samples, early.text_tokens, early.vision_units) == (
            whole.samples,
            whole.text_tokens,
            whole.vision_units,
        )


def test_a_trial_without_an_early_end_reports_every_step(prepared: Prepared, pool: WarmPool) -> None:
    agent = Agent(enough=100)
    first, second = reports(pool.ask(prepared.request(PIPELINE, SIX), 120, on_step=agent))
    assert tuple(agent.heard) == first.step_seconds
    assert len(first.step_seconds) == len(second.step_seconds) == 6


def test_ranks_do_not_wait_when_no_agent_listens(prepared: Prepared, pool: WarmPool) -> None:
    steered = Trial(warmup_steps=(), timed_steps=(0, 1), steered=True)
    assert len(reports(pool.ask(prepared.request(PIPELINE, steered), 120))[0].step_seconds) == 2


@pytest.mark.long
def test_the_wait_for_a_verdict_is_in_no_time_that_is_reported(example: Path, pool: WarmPool, tmp_path: Path) -> None:
    def slow_agent(_: float) -> bool:
        time.sleep(WAIT_SECONDS)
        return True

    # Steps of many layers, so that the exchanges take a small share of their time.
    request = prepared_of(example, tmp_path).request(
        plan_of("8+0r2,0", "4+8"), Trial(warmup_steps=(), timed_steps=(0, 1, 2))
    )
    start = time.monotonic()
    answered = reports(pool.ask(request, 120, on_step=slow_agent))
    elapsed = time.monotonic() - start
    for report in answered:
        assert sum(report.step_seconds) + 2 * WAIT_SECONDS < elapsed
        assert report.stage.idle_seconds * 3 <= sum(report.step_seconds)


def test_loader_workers_end_with_a_trial_that_ends_early(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    prepared = prepared_of(shallow, tmp_path, data={"workers": 2})
    ended = reports(pool.ask(prepared.request(PIPELINE, SIX), 120, on_step=Agent(enough=1)))
    assert len(ended[0].step_seconds) == 1
    assert len(pool.pids) == 2
    wait_for(lambda: not any(map(children, pool.pids)))
