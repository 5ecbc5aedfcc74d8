"""What every launcher promises: ranks that take requests one after another, give steps and answers, and end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.machines.nodes import cable, two_nodes
from tests.machines.simulated import SimulatedLauncher
from tests.programs.processes import has_ended, wait_for
from tests.programs.processes import ranks as ranks_of_tests
from tests.values import search as search_values
from tests.values.training import plan_of, prepared_of
from trials.launchers import Launcher, RankGroup
from trials.launchers.local import LocalLauncher
from trials.launchers.node_ranks import NodeLauncher
from trials.launchers.nodes import Nodes
from trials.tasks.answer import FailureReport, TrialReport
from trials.tasks.request import Request, Trial

TWO = Trial(warmup_steps=(0,), timed_steps=(1, 2))
THREE = Trial(warmup_steps=(), timed_steps=(0, 1, 2), steered=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A launcher, and requests for its ranks."""

    launcher: Launcher
    request: Callable[[Trial], Request]
    too_large: Request
    """One that does not fit the memory."""


def real(folder: Path, example: Path, launcher: Launcher) -> Site:
    """Ranks that train, wherever they are."""
    plan = plan_of("3+0", "1+2")
    roomy = prepared_of(example, folder)
    tight = prepared_of(example, folder, hardware={"devices": 2, "memory_limit": "1MiB"})
    return Site(
        launcher=launcher,
        request=lambda task: roomy.request(plan, task),
        too_large=tight.request(plan, TWO),
    )


def simulated(folder: Path) -> Site:
    plan = plan_of("4+0", "1+4")

    def request(task: Trial, memory_bytes: int = 1 << 40) -> Request:
        return search_values.prepared_of(folder, memory_bytes).request(plan, task)

    launcher = SimulatedLauncher(search_values.predictor_of())
    return Site(launcher=launcher, request=request, too_large=request(TWO, 1 << 20))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cable() as joined, two_nodes(joined) as both:
        yield both


@pytest.fixture(
    params=[
        "simulated",
        pytest.param("local", marks=pytest.mark.ranks),
        pytest.param("nodes", marks=(pytest.mark.ranks, pytest.mark.long)),
    ]
)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    if request.param == "simulated":
        return simulated(tmp_path)
    example: Path = request.getfixturevalue("shallow")
    if request.param == "local":
        return real(tmp_path, example, LocalLauncher(tmp_path / "ranks", 2, "cpu"))
    return real(tmp_path, example, NodeLauncher(request.getfixturevalue("nodes"), tmp_path / "ranks", 2, "cpu"))


@pytest.fixture
def ranks(site: Site) -> Iterator[RankGroup]:
    group = site.launcher.start()
    yield group
    group.end()


def reports(ranks: RankGroup) -> list[TrialReport]:
    """Of both ranks, when they have answered."""
    wait_for(lambda: len(ranks.answers()) == 2)
    found = [ranks.answers()[rank].report for rank in range(2)]
    assert all(isinstance(each, TrialReport) for each in found), found
    return [each for each in found if isinstance(each, TrialReport)]


def step_of(ranks: RankGroup) -> float:
    """The next one, waited for."""
    heard: list[float] = []

    def listen() -> bool:
        step = ranks.next_step()
        heard.extend(() if step is None else (step,))
        return bool(heard)

    wait_for(listen)
    return heard[0]


def test_ranks_take_requests_from_the_start_on_and_one_after_another_also_steered_ones_and_one_that_fails(
    site: Site, ranks: RankGroup
) -> None:
    for _ in range(2):
        ranks.send(site.request(TWO))
        assert ranks.next_step() is None  # nothing steers the trial
        assert [len(each.step_seconds) for each in reports(ranks)] == [2, 2]
    assert not ranks.ended()
    # Each step of a steered trial is heard once, and enough ends it on all ranks.
    for enough in (2, 3):
        ranks.send(site.request(THREE))
        heard: list[float] = []
        while len(heard) < enough:
            heard.append(step_of(ranks))
            assert ranks.next_step() is None
            ranks.decide(go_on=len(heard) < enough)
        first, second = reports(ranks)
        assert first.step_seconds == tuple(heard)
        assert len(second.step_seconds) == enough
    ranks.send(site.too_large)
    wait_for(ranks.answers)
    (rank, answer), *_ = ranks.answers().items()
    assert isinstance(answer.report, FailureReport)
    assert answer.report.cause.kind == "out-of-memory"
    assert answer.report.cause.rank == rank


def test_groups_are_started_again_and_none_leaves_a_process(site: Site) -> None:
    before = ranks_of_tests()
    for _ in range(2):
        group = site.launcher.start()
        try:
            group.send(site.request(TWO))
            assert len(reports(group)) == site.launcher.world_size == 2
            processes = [each for each in ranks_of_tests() if each not in before]
            assert len(processes) in (0, 2)  # none are simulated
        finally:
            group.end()
        assert all(map(has_ended, processes))
