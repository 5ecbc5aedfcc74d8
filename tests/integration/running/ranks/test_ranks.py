"""Rank processes: their answers, their failures, and that none is left over."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from autotune.workload import Prepared
from tests.programs.processes import children, has_ended, ranks, wait_for_file, wait_for_the_end
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.channels.folder import FolderChannel
from trials.launchers.local import LocalLauncher
from trials.machine.control_groups import KillsForMemory
from trials.outcome import Crash, OutOfMemory, Timeout
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport, read_report
from trials.tasks.request import REQUEST, Trial

pytestmark = pytest.mark.ranks

SHORT = Trial(warmup_steps=(0,), timed_steps=(1, 2))
FIRST = Trial(warmup_steps=(), timed_steps=(0,))
LONG = Trial(warmup_steps=(), timed_steps=tuple(range(6)) * 50)
PIPELINE = plan_of("8+0r2,0", "4+8")


def reports(answer: object) -> list[TrialReport]:
    assert isinstance(answer, Answers), answer
    return [report for report in answer.reports if isinstance(report, TrialReport)]


def test_a_trial_reports_each_ranks_seconds_bytes_and_losses(prepared: Prepared, pool: WarmPool) -> None:
    first, second = reports(pool.ask(prepared.request(PIPELINE, SHORT), 120))
    assert (first.stage.stage, second.stage.stage) == (0, 1)
    assert first.losses == second.losses
    assert first.samples == sum(prepared.epoch(PIPELINE.packing, 1).step(number).samples for number in (1, 2))
    for report in (first, second):
        parts = report.stage
        assert min(parts.forward_seconds, parts.backward_seconds, parts.optimizer_seconds) > 0
        passes = parts.load_seconds + parts.forward_seconds + parts.backward_seconds
        spent = passes + parts.optimizer_seconds + parts.idle_seconds
        assert spent == pytest.approx(sum(report.step_seconds) / 2, rel=1e-3)
        assert parts.peak_bytes > parts.static_bytes > 0


@pytest.mark.long
def test_processes_that_load_ahead_change_no_loss(
    example: Path, prepared: Prepared, pool: WarmPool, tmp_path: Path
) -> None:
    ahead = prepared_of(example, tmp_path, data={"workers": 2})
    alone = reports(pool.ask(prepared.request(PIPELINE, SHORT), 120))
    assert reports(pool.ask(ahead.request(PIPELINE, SHORT), 120))[0].losses == pytest.approx(alone[0].losses, rel=1e-5)


def test_a_loss_that_is_no_number_fails_the_trial_with_the_remedy(
    example: Path, pool: WarmPool, tmp_path: Path
) -> None:
    wild = prepared_of(example, tmp_path, training={"learning_rate": 1e30})
    answer = pool.ask(wild.request(PIPELINE, Trial(warmup_steps=(0,), timed_steps=(1, 2, 3))), 120)
    assert isinstance(answer, Crash)
    assert re.search(r"the loss of a step is (nan|inf); lower training.learning_rate", answer.detail)


def test_passing_the_memory_limit_is_out_of_memory_with_stage_and_bytes(
    wide: Path, pool: WarmPool, tmp_path: Path
) -> None:
    roomy, tight = plan_of("8+0", "4+8"), plan_of("8+0r8,0", "4+8r4,8")
    limited = prepared_of(wide, tmp_path, hardware={"memory_limit": "100MiB"})
    answer = pool.ask(limited.request(roomy, FIRST), 120)
    assert isinstance(answer, OutOfMemory)
    assert answer.limit_bytes == 100 << 20 < answer.needed_bytes
    assert answer.stage == answer.rank
    # The next plan, on new ranks, fits the same limit because it recomputes.
    fitting = reports(pool.ask(limited.request(tight, FIRST), 120))
    assert max(report.stage.peak_bytes for report in fitting) <= 100 << 20


def test_ranks_without_an_answer_in_time_are_ended(prepared: Prepared, tmp_path: Path) -> None:
    before = set(ranks())
    with WarmPool(LocalLauncher(tmp_path, 2, "cpu")) as pool:
        assert pool.ask(prepared.request(PIPELINE, SHORT), 0.5) == Timeout(seconds=0.5)
        assert not (set(ranks()) - before)


def test_an_error_in_a_rank_is_reported_with_its_reason(example: Path, pool: WarmPool, tmp_path: Path) -> None:
    prepared = prepared_of(example, tmp_path)
    prepared.index_file.unlink()
    answer = pool.ask(prepared.request(PIPELINE, SHORT), 120)
    assert isinstance(answer, Crash)
    assert f"{prepared.index_file.name} cannot be read" in answer.detail


def test_ranks_that_cannot_write_their_reports_say_so(prepared: Prepared, tmp_path: Path) -> None:
    def fill_the_disk(_: float) -> bool:
        for pid in pool.pids:
            psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (0, 0))
        return True

    with WarmPool(LocalLauncher(tmp_path, 2, "cpu")) as pool:
        answer = pool.ask(prepared.request(PIPELINE, SHORT), 120, on_step=fill_the_disk)
    assert isinstance(answer, Crash)
    assert answer.detail.startswith("it could not write its report; make the folder of its logs writable"), answer
    assert answer.of_machine


def test_a_killed_rank_is_a_crash_that_is_not_blamed_on_a_neighbour(prepared: Prepared, pool: WarmPool) -> None:
    reports(pool.ask(prepared.request(PIPELINE, SHORT), 120))
    started = ranks()
    assert [each.pid for each in started] == list(pool.pids)
    _, victim = started
    threading.Timer(1.0, victim.kill).start()
    answer = pool.ask(prepared.request(PIPELINE, LONG), 120)
    assert answer == Crash(rank=1, detail="the process was ended by signal 9")
    assert all(map(has_ended, started))


@pytest.fixture
def group() -> Iterator[Path]:
    """Return a memory control group below that of this process, without a limit yet."""
    own = re.search(r":memory:/(.*)", Path("/proc/self/cgroup").read_text())
    if os.geteuid() != 0 or not own:
        pytest.skip("making a control group of version 1 needs root")
    folder = Path("/sys/fs/cgroup/memory") / own[1] / f"autotune-test-{uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            join(folder.parent, int(pid))
        folder.rmdir()


def join(group: Path, pid: int) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def limit(group: Path) -> None:
    """Allow the group little more memory than it uses."""
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + (4 << 20)))


def test_a_rank_that_is_killed_because_memory_runs_out_is_named_so(
    prepared: Prepared, tmp_path: Path, group: Path
) -> None:
    def run_out(_: float) -> bool:
        join(group.parent, os.getpid())
        limit(group)
        join(group, pool.pids[1])
        return True

    join(group, os.getpid())  # while it starts its ranks: their control group is that of this process
    with WarmPool(LocalLauncher(tmp_path, 2, "cpu")) as pool:
        answer = pool.ask(prepared.request(PIPELINE, LONG), 120, on_step=run_out)
    assert isinstance(answer, Crash)
    assert answer.rank == 1
    assert re.match(
        r"the process was killed, and memory ran out meanwhile: all processes here may use \d+ MiB; allow",
        answer.detail,
    )


def test_memory_that_runs_out_elsewhere_kills_no_rank(prepared: Prepared, tmp_path: Path, group: Path) -> None:
    def run_out_elsewhere(_: float) -> bool:
        limit(group)
        program = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); bytearray(1 << 26)"
        of_machine = KillsForMemory(membership="")
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
        assert of_machine.any
        os.kill(pool.pids[1], signal.SIGKILL)
        return True

    with WarmPool(LocalLauncher(tmp_path, 2, "cpu")) as pool:
        answer = pool.ask(prepared.request(PIPELINE, LONG), 120, on_step=run_out_elsewhere)
    assert answer == Crash(rank=1, detail="the process was ended by signal 9")


@pytest.mark.parametrize(
    ("moment", "expected"),
    parameters(
        {
            "start": ("ranks/logs/rank-1.log", 1),
            "work": ("ranks/request-*/rendezvous", 3),
            "wait for a verdict": ("ranks/request-*/step-1.json", 3),
        },
        short=("start",),
    ),
)
def test_ranks_end_when_their_agent_is_killed(prepared: Prepared, tmp_path: Path, moment: str, expected: int) -> None:
    """Together with the fork server, which is alone until it has imported what they need."""
    request = tmp_path / "request.json"
    request.write_text(wire.encode(prepared.request(PIPELINE, LONG)))
    script = (
        "import sys, time; from pathlib import Path; from trials import wire; from trials.run.pool import WarmPool;"
        "from trials.launchers.local import LocalLauncher; from trials.tasks.request import Request;"
        "request = wire.decode(Request, Path(sys.argv[1]).read_text());"
        "pool = WarmPool(LocalLauncher(Path(sys.argv[2]), 2, 'cpu'));"
        "pool.ask(request, 120, on_step=lambda _: time.sleep(60))"
    )
    agent = subprocess.Popen([sys.executable, "-c", script, request, tmp_path / "ranks"])
    try:
        wait_for_file(tmp_path, moment)
        time.sleep(1)
        started = children(agent.pid)
        assert len(started) == expected
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    wait_for_the_end(started)


@pytest.mark.long
def test_a_request_is_served_under_another_launcher(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / REQUEST).write_text(wire.encode(prepared.request(PIPELINE, SHORT)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    worker = ["-m", "trials.run.worker", "--request", str(tmp_path)]
    done = subprocess.run(
        [*torchrun, *worker], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = [read_report(FolderChannel(tmp_path), rank) for rank in range(2)]
    assert all(answer is not None and isinstance(answer.report, TrialReport) for answer in answers)


def test_a_rank_without_an_agent_that_fails_says_why_and_waits_for_no_other_rank(
    prepared: Prepared, tmp_path: Path
) -> None:
    request = prepared.request(plan_of("1+1"), SHORT)
    (tmp_path / REQUEST).write_text(wire.encode(request))
    # Under NCCL both wait for the other ranks: to leave the group, and its destructors at the end of the interpreter.
    program = (
        "import atexit, time; from deepspeed import comm; from trials.run.worker import main;"
        "comm.destroy_process_group = lambda: time.sleep(600); atexit.register(time.sleep, 600);"
        "main()"
    )
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, "--request", tmp_path],
        env={**os.environ, **ranks},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "InvalidPlan: stages hold 1 vision" in done.stderr
