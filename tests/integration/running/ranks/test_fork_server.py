"""The fork server: when it cannot start, when it is killed, and what forked ranks find."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from autotune.workload import Prepared
from tests.programs.processes import children, has_ended, ranks, wait_for_the_end
from tests.values.training import plan_of, prepared_of
from trials.launchers.local import LocalLauncher
from trials.outcome import Crash
from trials.run.pool import Answers, WarmPool
from trials.sites.local import LocalSite
from trials.tasks.request import Trial

pytestmark = pytest.mark.ranks

PLAN = plan_of("4+2", data=2, zero=1)
TRIAL = Trial(warmup_steps=(), timed_steps=(0, 1))


@pytest.fixture(scope="module")
def prepared(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_of(shallow, tmp_path_factory.mktemp("job"))


def servers() -> list[psutil.Process]:
    """Return the fork servers of this process, without their ranks."""
    return [
        child for child in children() if child.ppid() == os.getpid() and "trials.run.fork_server" in child.cmdline()
    ]


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use another fork server for this test: the text of the variable selects it, and 01 is one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "01")


def trap_compilers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put compilers first in the path that do nothing but make a file, and return this file."""
    folder.mkdir()
    compiled = folder / "compiled"
    for name in ("cc", "c++", "gcc", "g++"):
        (folder / name).write_text(f"#!/bin/sh\ntouch '{compiled}'\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(folder), os.environ["PATH"])))
    return compiled


def test_ranks_of_a_profile_and_a_training_have_the_threads_of_trials_side_by_side(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    site, started_before = LocalSite("cpu", groups=3), servers()
    assert {each.environment["OMP_NUM_THREADS"] for each in site.commands(2, tmp_path)} == {"2"}
    with WarmPool(site.launcher(tmp_path / "ranks", 2)) as pool:
        assert isinstance(pool.ask(prepared.request(PLAN, TRIAL), 120), Answers)
        (server,) = set(servers()) - set(started_before)
        assert server.environ()["OMP_NUM_THREADS"] == "2"


@pytest.mark.usefixtures("own_server")
def test_imports_that_fail_are_a_crash_with_the_reason_in_a_log(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libaio is missing')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    with WarmPool(LocalLauncher(tmp_path / "ranks", 2, "cpu")) as pool:
        answer = pool.ask(prepared.request(PLAN, TRIAL), 120)
    assert answer == Crash(rank=0, detail="the process ended with exit code 1")
    assert "libaio is missing" in (tmp_path / "ranks" / "logs" / "imports.log").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("own_server")
def test_ranks_end_with_a_server_that_is_killed_and_the_next_request_starts_another(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("storage", "trials"):  # as in the folder of a user who has packages of these common names
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not that one')\n")
    monkeypatch.chdir(tmp_path)
    compiled = trap_compilers(tmp_path / "bin", monkeypatch)
    others = set(servers())
    with WarmPool(LocalLauncher(tmp_path / "ranks", 2, "cpu")) as pool:
        request = prepared.request(PLAN, TRIAL)
        assert isinstance(pool.ask(request, 120), Answers)
        (server,) = set(servers()) - others
        started = [psutil.Process(pid) for pid in pool.pids]
        assert [each.ppid() for each in started] == [server.pid] * 2

        def kill(_: float) -> bool:
            server.kill()
            return True

        answer = pool.ask(request, 120, on_step=kill)
        assert answer == Crash(rank=0, detail="the process was ended by signal 9")
        wait_for_the_end(started)
        assert isinstance(pool.ask(request, 120), Answers)
        assert server not in servers()
    assert not compiled.exists()


def test_pools_share_a_server_that_computes_nothing(prepared: Prepared, pool: WarmPool, tmp_path: Path) -> None:
    """Threads of OpenMP, or the start of CUDA, would break what is forked."""
    request = prepared.request(PLAN, TRIAL)
    assert isinstance(pool.ask(request, 120), Answers)
    with WarmPool(LocalLauncher(tmp_path, 2, "cpu")) as other:
        assert isinstance(other.ask(request, 120), Answers)
        (parent,) = {psutil.Process(pid).ppid() for pid in (*pool.pids, *other.pids)}
        names = [psutil.Process(pid).name() for pid in other.pids]
        started = ranks()
    server = psutil.Process(parent)
    blas = 2 * (os.cpu_count() or 1)  # NumPy's and SciPy's OpenBLAS have a thread per core, and end them at a fork
    assert server.num_threads() <= (1 if server.environ()["OMP_NUM_THREADS"] == "1" else 1 + blas)
    assert names == ["rank 0", "rank 1"]
    assert len(started) == 4
    assert sum(map(has_ended, started)) == 2
