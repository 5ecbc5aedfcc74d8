"""Ranks without a trial: where they listen, what their environment holds, and that they end with their agent."""

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.programs.processes import children, free_port, have_ended, ranks, wait_for, wait_for_file, wait_for_the_end
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.channels.folder import FolderChannel
from trials.launchers.commands import worker_commands
from trials.launchers.local import LocalLauncher
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport, read_report
from trials.tasks.request import Trial, write_request

pytestmark = pytest.mark.ranks

PLAN = plan_of("3+0", "1+2")
TRIAL = Trial(warmup_steps=(), timed_steps=(0, 1))
SECRETS = {"AUTOTUNE_DB_URL": "postgresql://me:s3cret@db/results", "PGPASSWORD": "s3cret", "PGSERVICEFILE": "/s3cret"}
AGENT = """
import sys, time
from pathlib import Path
from trials import wire
from trials.run.pool import WarmPool
from trials.launchers.commands import worker_commands
from trials.launchers.local import LocalLauncher
from trials.tasks.request import Request

request = wire.decode(Request, Path(sys.argv[1]).read_text())
pool = WarmPool(LocalLauncher(Path(sys.argv[2]), 2, "cpu"))
pool.ask(request, 120, on_step=lambda _: time.sleep(60))
"""


def outer_interface() -> str:
    """A network interface that other machines reach; skips the test where there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and not each.address.startswith("127.") for each in addresses):
            return name
    pytest.skip("no network but the loopback")


def test_ranks_listen_on_the_loopback_alone_and_know_no_password(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The text of OMP_NUM_THREADS makes these ranks come from a server that is started now; 001 is one thread.
    for name, value in {**SECRETS, "GLOO_SOCKET_IFNAME": outer_interface(), "OMP_NUM_THREADS": "001"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "a #?%41 b"
    request = prepared_of(shallow, tmp_path).request(PLAN, TRIAL)
    addresses: set[str] = set()
    environments: list[dict[str, str]] = []
    rendezvous: list[Path] = []

    def look(_: float) -> bool:
        rendezvous.extend(folder.glob("request-*/rendezvous"))
        for rank in children():
            with suppress(psutil.NoSuchProcess):  # a short-lived helper of the ranks has ended since it was listed
                environments.append(rank.environ())
                addresses.update(each.laddr.ip for each in rank.net_connections("inet"))
        return True

    with WarmPool(LocalLauncher(folder, 2, "cpu")) as pool:
        assert isinstance(pool.ask(request, 120, on_step=look), Answers)
    assert rendezvous
    assert len(environments) >= 2
    assert any(each["OMP_NUM_THREADS"] == "001" for each in environments)
    assert not any("s3cret" in value for each in environments for value in each.values())
    assert addresses
    assert all(ipaddress.ip_address(each).is_loopback for each in addresses), addresses


@pytest.mark.long
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_ranks_that_a_user_starts_listen_on_the_loopback_alone(shallow: Path, tmp_path: Path, address: str) -> None:
    write_request(FolderChannel(tmp_path), prepared_of(shallow, tmp_path).request(PLAN, TRIAL))
    addresses: set[str] = set()
    commands = worker_commands(2, "cpu", tmp_path)
    rendezvous = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(command.argv, env={**os.environ, **command.environment, **rendezvous}) for command in commands
    ]
    try:
        wait_for(lambda: have_ended(started, addresses))
    finally:
        for process in started:
            process.kill()
            process.wait()
    answers = [read_report(FolderChannel(tmp_path), rank) for rank in range(2)]
    assert all(answer is not None and isinstance(answer.report, TrialReport) for answer in answers)
    assert addresses
    assert all(ipaddress.ip_address(each).is_loopback for each in addresses), addresses


@pytest.mark.long
def test_stopped_ranks_and_their_loaders_end_when_their_agent_is_killed(shallow: Path, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(wire.encode(prepared_of(shallow, tmp_path, data={"workers": 1}).request(PLAN, TRIAL)))
    agent = subprocess.Popen([sys.executable, "-c", AGENT, request, tmp_path / "ranks"])
    try:
        wait_for_file(tmp_path, "ranks/request-*/step-1.json")
        started = children(agent.pid)
        assert len(started) == 5  # the server that forks ranks, and two ranks, each with a process that loads
        for process in started:
            process.suspend()
        wait_for(lambda: all(process.status() == psutil.STATUS_STOPPED for process in started))
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    wait_for_the_end(started)


def test_ranks_outlive_the_thread_that_first_asked_them(shallow: Path, tmp_path: Path) -> None:
    request = prepared_of(shallow, tmp_path).request(PLAN, TRIAL)
    others = set(ranks())  # those that many tests share
    with WarmPool(LocalLauncher(tmp_path / "ranks", 2, "cpu")) as pool:
        first = threading.Thread(target=pool.ask, args=(request, 120))
        first.start()
        first.join()
        ours = set(ranks()) - others
        assert isinstance(pool.ask(request, 120), Answers)
        assert set(ranks()) - others == ours
        assert len(ours) == 2
    assert set(ranks()) <= others
