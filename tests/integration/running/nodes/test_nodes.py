"""Ranks on two nodes: the same steps as on one machine, and what happens when a node or a rank is lost."""

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from autotune.search.execution.profiling import profile_layers
from tests.machines.nodes import OTHER, Cable, NodeProcesses, cable, two_nodes
from tests.programs.processes import children, has_ended, ranks, wait_for_the_end
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of, variant_of
from trials.errors import NodeRefused, NodesMissing
from trials.launchers import nodes as nodes_of_agent
from trials.launchers.copies import copy_digest
from trials.launchers.local import LocalLauncher
from trials.launchers.node_messages import TOKEN
from trials.launchers.node_ranks import NodeLauncher, NodeRanks
from trials.launchers.nodes import Nodes
from trials.outcome import Crash
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Request, Trial

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[4]
SLOW_BITS = 10e6
"""Bits per second."""
CUT_SECONDS = 10.0
"""Less than the silence after which a node is lost."""
LONG_CUT_SECONDS = 300.0
AN_HOUR_OFF = """
import os, time
from pathlib import Path

here, clock, nanoseconds = Path(__file__).parent, time.time, time.time_ns
time.time, time.time_ns = lambda: clock() + 3600, lambda: nanoseconds() + 3600 * 10**9
(here / f"{os.getpid()}.late").touch()
"""
"""A `sitecustomize` for Python processes with a wrong clock. One of the system cannot be wrong in a namespace alone."""
PLAN = plan_of("3+0", "1+2")
TRIAL = Trial(warmup_steps=(), timed_steps=(0, 1, 2))


@pytest.fixture(scope="module")
def joined() -> Iterator[Cable]:
    with cable() as made:
        yield made


@pytest.fixture(scope="module")
def starter(joined: Cable) -> NodeProcesses:
    return NodeProcesses(joined)


@pytest.fixture(scope="module")
def nodes(joined: Cable, starter: NodeProcesses) -> Iterator[Nodes]:
    with two_nodes(joined, starter) as both:
        yield both


@pytest.fixture(scope="module")
def request_of_trial(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Request:
    return prepared_of(shallow, tmp_path_factory.mktemp("job")).request(PLAN, TRIAL)


@pytest.fixture
def pool(nodes: Nodes, tmp_path: Path) -> Iterator[WarmPool]:
    with WarmPool(NodeLauncher(nodes, tmp_path / "nodes", 2, "cpu")) as both:
        yield both


def losses(pool: WarmPool, request: Request) -> list[tuple[float, ...]]:
    answer = pool.ask(request, 120)
    assert isinstance(answer, Answers), answer
    return [report.losses for report in answer.reports if isinstance(report, TrialReport)]


def disturbed(pool: WarmPool, request: Request, disturb: Callable[[], None]) -> Crash:
    """Disturb a trial after its first step, and return the cause of its failure."""
    steps: list[float] = []

    def listen(seconds: float) -> bool:
        if not steps:
            disturb()
        steps.append(seconds)
        return True

    answer = pool.ask(request, 120, on_step=listen)
    assert isinstance(answer, Crash), answer
    return answer


def rank_of_other(starter: NodeProcesses) -> psutil.Process:
    (found,) = ranks(starter.processes[1].pid)
    return found


def test_a_node_with_another_token_is_not_let_in(
    joined: Cable, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starter, looks = NodeProcesses(joined, token="guessed"), itertools.count()

    def clock() -> float:
        """An hour later when the node has ended, and the agent has looked again."""
        has_ended = 1 in starter.processes and starter.processes[1].poll() is not None
        return time.monotonic() + 3600.0 * (has_ended and 0 in both._present and next(looks) > 1)

    monkeypatch.setattr(nodes_of_agent, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with (
        two_nodes(joined, starter) as both,
        pytest.raises(NodesMissing, match=r"node 1 has not come .*\(a process with another token has come in its pl"),
    ):
        NodeLauncher(both, tmp_path, 2, "cpu").start()
    assert "the token of this node is not that of the agent" in capfd.readouterr().err


def test_a_node_whose_number_no_node_has_is_refused(joined: Cable) -> None:
    starter = NodeProcesses(joined)
    with two_nodes(joined, starter) as both:
        both.require(1)
        agent, token = starter.of_agent
        command = [sys.executable, "-P", "-m", "autotune", "node", agent, "--number", "2"]
        ended = subprocess.run(command, env={**os.environ, TOKEN: token}, capture_output=True, text=True, check=False)
    assert ended.returncode
    assert "there is no node 2: the agent serves 2, with numbers from 0" in ended.stderr


@pytest.mark.long
def test_a_node_whose_clock_is_an_hour_off_takes_part(joined: Cable, request_of_trial: Request, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AN_HOUR_OFF)
    starter = NodeProcesses(joined, environment={"PYTHONPATH": str(tmp_path)})
    with two_nodes(joined, starter) as both, WarmPool(NodeLauncher(both, tmp_path / "nodes", 2, "cpu")) as pool:
        assert len(losses(pool, request_of_trial)) == 2
        for process in (psutil.Process(starter.processes[1].pid), rank_of_other(starter).parent()):
            assert process is not None
            assert (tmp_path / f"{process.pid}.late").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("trials/grid.py", "has other files of vlm-autotune 0.1.0 than"),
        ("torch-2.0.0.dist-info/METADATA", "has torch 2.0.0, and"),
    ],
)
def test_a_node_with_other_software_is_refused_before_any_rank_starts(
    joined: Cable, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str, reason: str
) -> None:
    other = tmp_path / "other"
    for package in ("autotune", "storage", "trials"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = other / change
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        f"{file.read_text()}\n" if file.exists() else "Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n"
    )
    starter = NodeProcesses(joined, environment={"PYTHONPATH": str(other)})
    with two_nodes(joined, starter) as both, pytest.raises(NodeRefused, match=rf"node 1 \({OTHER}\) {reason}"):
        NodeLauncher(both, tmp_path, 2, "cpu").start()
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize(
    "plan",
    parameters(
        {
            "pipeline": PLAN,
            "data parallel, ZeRO 2": plan_of("4+2", data=2, zero=2),
            "data parallel, ZeRO 3": plan_of("4+2", data=2, zero=3),
        },
        short=("pipeline",),
    ),
)
def test_two_nodes_have_the_losses_of_one_machine(
    plan: Plan, pool: WarmPool, request_of_trial: Request, tmp_path: Path
) -> None:
    request = replace(request_of_trial, plan=plan)
    with WarmPool(LocalLauncher(tmp_path / "here", 2, "cpu")) as here:
        expected = losses(here, request)
    assert losses(pool, request) == expected
    assert [len(of_rank) for of_rank in expected] == [3, 3]


def test_a_node_with_another_copy_of_the_model_is_named(pool: WarmPool, shallow: Path, tmp_path: Path) -> None:
    variant = variant_of(shallow, tmp_path / "variant", lambda _: None)
    request = prepared_of(variant, tmp_path).request(PLAN, TRIAL)
    copy_digest(request.job.model)  # at the agent, which reads it once
    config = variant / "model" / "config.json"
    config.write_text(f"{config.read_text()}\n")
    answer = pool.ask(request, 120)
    assert isinstance(answer, Crash), answer
    assert f"model.path {variant / 'model'} holds other files here than on the node of the agent" in answer.detail


def test_a_rank_that_dies_is_named_with_its_node_and_its_log_comes_back(
    pool: WarmPool, request_of_trial: Request, starter: NodeProcesses, tmp_path: Path
) -> None:
    cause = disturbed(pool, request_of_trial, lambda: rank_of_other(starter).kill())
    assert (cause.rank, cause.detail) == (1, f"on {OTHER}: the process was ended by signal 9")
    assert (tmp_path / "nodes" / "logs" / "node-1-rank-0.log").exists()
    assert len(losses(pool, request_of_trial)) == 2


@pytest.mark.long
def test_a_node_that_dies_at_the_rendezvous_is_named_and_starts_anew(
    pool: WarmPool, request_of_trial: Request, starter: NodeProcesses
) -> None:
    there: list[psutil.Process] = []

    def kill() -> None:
        """As soon as its rank is there, before it has imported what it needs to meet the other."""
        node = starter.processes[1]
        if not there and ranks(node.pid):
            there.extend(children(node.pid))
            node.kill()

    cause = pool.ask(request_of_trial, 120, on_wait=kill)
    assert cause == Crash(
        rank=1, detail=f"node {OTHER} is lost: it gave no sign of life 15 times in a row", of_machine=True
    )
    wait_for_the_end([*there, *ranks(starter.processes[0].pid)])
    assert len(losses(pool, request_of_trial)) == 2


@pytest.mark.long
def test_a_node_behind_a_cut_cable_is_named_and_ends_its_ranks_itself(
    pool: WarmPool, request_of_trial: Request, starter: NodeProcesses, joined: Cable
) -> None:
    there: list[psutil.Process] = []

    def vanish() -> None:
        there.extend((psutil.Process(starter.processes[1].pid), *children(starter.processes[1].pid)))
        joined.set("down")

    cause = disturbed(pool, request_of_trial, vanish)
    assert (cause.rank, cause.detail) == (1, f"node {OTHER} is lost: it gave no sign of life 15 times in a row")
    psutil.wait_procs(there, timeout=30)
    assert all(map(has_ended, there))
    joined.set("up")
    assert len(losses(pool, request_of_trial)) == 2


def test_a_node_that_was_given_up_while_it_was_suspended_ends_once_it_goes_on(
    pool: WarmPool, request_of_trial: Request, starter: NodeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_of_agent, "MISSED_BEATS", 2)
    monkeypatch.setattr(NodeRanks, "aftermath_seconds", 4.0)
    there: list[psutil.Process] = []

    def suspend() -> None:
        there.extend((psutil.Process(starter.processes[1].pid), *children(starter.processes[1].pid)))
        for process in there:
            process.suspend()

    cause = disturbed(pool, request_of_trial, suspend)
    assert (cause.rank, cause.detail) == (1, f"node {OTHER} is lost: it gave no sign of life 2 times in a row")
    monkeypatch.undo()
    for process in there:
        process.resume()
    wait_for_the_end(there)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_node_behind_a_cable_that_is_cut_for_minutes_is_missing_until_it_is_mended(
    pool: WarmPool, request_of_trial: Request, joined: Cable
) -> None:
    expected, begun = losses(pool, request_of_trial), time.monotonic()
    cause = disturbed(pool, request_of_trial, lambda: joined.set("down"))
    assert cause == Crash(
        rank=1, detail=f"node {OTHER} is lost: it gave no sign of life 15 times in a row", of_machine=True
    )
    with pytest.raises(NodesMissing, match=f"node {OTHER} is lost: it gave no sign of life"):
        pool.ask(request_of_trial, 120)
    time.sleep(max(begun + LONG_CUT_SECONDS - time.monotonic(), 0))
    joined.set("up")
    assert losses(pool, request_of_trial) == expected


@pytest.mark.long
def test_a_cable_that_is_cut_for_some_seconds_changes_no_step(
    pool: WarmPool, request_of_trial: Request, joined: Cable
) -> None:
    expected = losses(pool, request_of_trial)
    steps: list[float] = []
    mended = threading.Timer(CUT_SECONDS, joined.set, ["up"])

    def cut(seconds: float) -> bool:
        if not steps:
            joined.set("down")
            mended.start()
        steps.append(seconds)
        return True

    try:
        answer = pool.ask(request_of_trial, 120, on_step=cut)
        assert isinstance(answer, Answers), answer
    finally:
        mended.join()
    assert [each.losses for each in answer.reports if isinstance(each, TrialReport)] == expected
    assert max(steps) > CUT_SECONDS / 2  # the others waited


@pytest.mark.long
def test_the_profile_over_a_slow_link_ends_in_time_and_tells_its_speed(
    pool: WarmPool, joined: Cable, shallow: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepared_of(shallow, tmp_path)
    work = prepared.workload
    prepared = replace(prepared, workload=replace(work, hardware=replace(work.hardware, nodes=2)))
    joined.limit(f"{SLOW_BITS:.0f}bit")
    try:
        costs = profile_layers(prepared, pool, tmp_path)
    finally:
        joined.limit(None)
    assert 8 / costs.link.seconds_per_byte == pytest.approx(SLOW_BITS, rel=0.15)
    assert "messages of 2 stages (1/" in caplog.text


@pytest.mark.long
def test_a_second_agent_is_told_who_uses_the_nodes_and_disturbs_nothing(
    joined: Cable, pool: WarmPool, request_of_trial: Request, tmp_path: Path
) -> None:
    expected = losses(pool, request_of_trial)
    with two_nodes(joined) as others, pytest.raises(NodeRefused, match="another autotune process uses the devices of"):
        NodeLauncher(others, tmp_path / "others", 2, "cpu").start()
    assert losses(pool, request_of_trial) == expected
