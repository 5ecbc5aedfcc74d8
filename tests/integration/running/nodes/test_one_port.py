"""Two agents on one port, by every way in which a port is chosen: the second one disturbs nothing and leaves nothing.

The port of an agent's own store is the system's choice.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from autotune.machine.node import node_facts
from tests.machines.nodes import Cable, cable, ssh_over
from tests.programs.processes import children, free_port, has_ended, wait_for
from tests.values.training import plan_of, prepared_of
from trials.channels.folder import FolderChannel
from trials.errors import NodesMissing
from trials.launchers import command_starter
from trials.launchers.command_starter import CommandStarter, OverSsh, Tool
from trials.launchers.commands import worker_commands
from trials.launchers.node_ranks import NodeLauncher
from trials.launchers.nodes import Nodes
from trials.outcome import Crash
from trials.run.pool import Answers, WarmPool
from trials.sites.deepspeed import DeepSpeed
from trials.sites.torchrun import Torchrun
from trials.tasks.answer import FailureReport, TrialReport, read_report
from trials.tasks.request import Request, Trial, write_request

pytestmark = [pytest.mark.ranks, pytest.mark.long]

PLAN = plan_of("3+0", "1+2")


@pytest.fixture(scope="module")
def joined() -> Iterator[Cable]:
    with cable() as made:
        yield made


@pytest.fixture(autouse=True)
def ssh(joined: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(ssh_over(joined, tmp_path / "bin")), prepend=":")


@pytest.fixture
def request_of_trial(shallow: Path, tmp_path: Path) -> Request:
    return prepared_of(shallow, tmp_path).request(PLAN, Trial(warmup_steps=(), timed_steps=(0, 1, 2)))


@contextmanager
def agent(tool: Tool, joined: Cable, folder: Path) -> Iterator[NodeLauncher]:
    """The launcher of an agent of a user of its own, whose locks on the devices are not those of others."""
    hosts = (joined.here, joined.there)
    starter = CommandStarter(tool, (1, 1), joined.here, folder, hosts=hosts, reach=OverSsh(), show=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        with Nodes(2, 1, joined.here, node_facts(), starter, patience_seconds=100) as nodes:
            yield NodeLauncher(nodes, folder / "ranks", 2, "cpu")


def losses(pool: WarmPool, request: Request) -> list[tuple[float, ...]]:
    answer = pool.ask(request, 120)
    assert isinstance(answer, Answers), answer
    return [report.losses for report in answer.reports if isinstance(report, TrialReport)]


def test_where_torchrun_finds_its_port_taken_the_second_agent_says_so_and_ends(
    joined: Cable, request_of_trial: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(command_starter, "free_port", lambda _: port)
    tool, others = Torchrun("static"), set(children())
    with agent(tool, joined, tmp_path / "first") as first, WarmPool(first) as pool:
        expected = losses(pool, request_of_trial)
        ours = set(children()) - others
        with (
            agent(tool, joined, tmp_path / "second") as second,
            pytest.raises(NodesMissing, match=rf"node 0 \({joined.here}\) has ended .*port: {port}.*EADDRINUSE"),
        ):
            second.start()
        assert set(children()) - others <= ours
        assert ours
        assert not any(map(has_ended, ours))
        assert losses(pool, request_of_trial) == expected
    wait_for(lambda: all(map(has_ended, ours)))


@pytest.mark.parametrize("name", ["deepspeed", "c10d", "port of the environment"])
def test_where_no_port_is_shared_two_agents_work_at_once(
    name: str, joined: Cable, request_of_trial: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's launcher only passes its port on, and torchrun's agents meet in the store of autotune."""
    tool: Tool = DeepSpeed((joined.here, joined.there), None) if name == "deepspeed" else Torchrun("c10d")
    if name == "deepspeed":
        port = free_port()
        monkeypatch.setattr(command_starter, "free_port", lambda _: port)
    if name == "port of the environment":  # as an operator of a cluster sets it
        tool = Torchrun("static")
        monkeypatch.setenv("PET_RDZV_BACKEND", "c10d")
        monkeypatch.setenv("PET_RDZV_ENDPOINT", f"{joined.here}:{free_port()}")
    with agent(tool, joined, tmp_path / "first") as first, WarmPool(first) as one:
        expected = losses(one, request_of_trial)
        assert len(expected) == 2
        with agent(tool, joined, tmp_path / "second") as second, WarmPool(second) as other:
            assert losses(other, request_of_trial) == expected
            assert losses(one, request_of_trial) == expected


def test_ranks_of_two_requests_with_one_master_port_do_not_train_together(shallow: Path, tmp_path: Path) -> None:
    """The first one's second rank comes last, when that of the other could have taken its place."""
    port, folders = free_port(), [tmp_path / name for name in ("first", "second")]
    for folder, steps in zip(folders, ((0, 1, 2), (1, 2)), strict=True):
        request = prepared_of(shallow, folder).request(PLAN, Trial(warmup_steps=(), timed_steps=steps))
        write_request(FolderChannel(folder), request)
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
        command = worker_commands(2, "cpu", folder)[rank]
        environment = {**os.environ, **command.environment, "MASTER_PORT": str(port)}
        started.append(subprocess.Popen(command.argv, env=environment))
        return started[-1]

    try:
        master = start(folders[0], 0)
        wait_for(lambda: listens(master, port))
        assert [start(folders[1], rank).wait(120) for rank in range(2)] == [1, 1]
        assert start(folders[0], 1).wait(120) == master.wait(120) == 0
    finally:
        for process in started:
            process.kill()
            process.wait()
    answers = [[read_report(FolderChannel(folder), rank) for rank in range(2)] for folder in folders]
    assert all(answer is not None and isinstance(answer.report, TrialReport) for answer in answers[0])
    for answer, reason in zip(answers[1], ("Address already in use", "is that of other ranks"), strict=True):
        assert answer is not None
        assert isinstance(answer.report, FailureReport)
        assert isinstance(answer.report.cause, Crash)
        assert reason in answer.report.cause.detail


def listens(process: "subprocess.Popen[bytes]", port: int) -> bool:
    found = psutil.Process(process.pid).net_connections("tcp")
    return any(each.laddr.port == port for each in found if each.status == psutil.CONN_LISTEN)


def test_commands_that_are_printed_for_two_requests_have_ports_of_their_own(tmp_path: Path) -> None:
    ports = {worker_commands(2, "cpu", tmp_path)[0].environment["MASTER_PORT"] for _ in range(8)}
    assert len(ports) > 1
    assert "29500" not in ports
