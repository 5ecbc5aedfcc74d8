"""Runs cases in processes that are replaced when they hang, die or grow: `python -m tests.fuzz.worker`.

Everything is imported once; each process is a fork of this one. It reads one JSON object from stdin, with the `seed`,
the `cases` (their numbers by kind), the `limits` and a `folder`, in which it writes a JSON line for each case.
"""

import faulthandler
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.fuzz.cases import Case, is_ours, run_case
from tests.fuzz.entries import Entries
from tests.fuzz.request import ANSWERS, Limits
from tests.fuzz.specimens import Specimens

_MEBI = 1 << 20
_GRACE_SECONDS = 10.0
"""Seconds after which a process that should have ended is killed."""
_FORGET_PEAK = "5"  # proc(5): resets VmHWM to VmRSS
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')


@dataclass(slots=True, kw_only=True)
class Server:
    """Starts one process after another, each for the remaining cases."""

    limits: Limits
    folder: Path

    def serve(self, cases: list[Case]) -> Iterator[dict[str, Any]]:
        """Yield the result of each case."""
        done = 0
        while done < len(cases):
            for verdict in self._fork(cases[done:]):
                yield verdict
                done += 1

    def _fork(self, cases: list[Case]) -> Iterator[dict[str, Any]]:
        """Yield the results of the cases that one process survives, and of the next one."""
        reading, writing = os.pipe()
        log = self.folder / "log"
        process = os.fork()
        if process == 0:
            os.close(reading)
            _child(cases, self.folder, self.limits, writing, log)
        os.close(writing)
        answered = 0
        with os.fdopen(reading, "rb") as answers:
            while select.select([answers], [], [], self.limits.seconds + _GRACE_SECONDS)[0]:
                if not (line := answers.readline()):
                    break
                answered += 1
                yield json.loads(line)
            else:
                os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if answered < len(cases) and not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0):
            yield {
                "verdict": "fault",
                "why": _death_of(status, log),
                "seconds": self.limits.seconds,
                "mebibytes": 0.0,
            }


def _child(cases: list[Case], folder: Path, limits: Limits, writing: int, log: Path) -> NoReturn:
    with log.open("w") as messages:
        for stream in (1, 2):
            os.dup2(messages.fileno(), stream)
        specimens = Specimens(folder)
        entries = Entries(specimens)
        kinds = {case.kind for case in cases}
        files = {kind: specimens.of(kind) for kind in kinds}
        start = _resident_mebibytes()
        for case in cases:
            faulthandler.dump_traceback_later(limits.seconds, exit=True, file=messages)
            before = _resident_mebibytes()
            Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
            begun = time.process_time()
            verdict, why = run_case(case, entries, files[case.kind], folder)
            seconds, grown = time.process_time() - begun, _peak_mebibytes() - before
            faulthandler.cancel_dump_traceback_later()
            if seconds > limits.cpu_seconds:
                verdict, why = "fault", f"{seconds:.1f} s of the processor, then {verdict}: {why}"
            if grown > limits.mebibytes:
                verdict, why = "fault", f"grew by {grown:.0f} MiB, then {verdict}: {why}"
            document = {"verdict": verdict, "why": why, "seconds": seconds, "mebibytes": grown}
            os.write(writing, json.dumps(document).encode() + b"\n")
            if _resident_mebibytes() - start > limits.mebibytes:  # what many cases left behind is no fault of the next
                break
    os._exit(0)


def _limit_memory(limits: Limits) -> None:
    """Limit the private memory; mapped files do not count."""
    held = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
    most = held + 2 * limits.mebibytes * _MEBI
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _resident_mebibytes() -> float:
    return _status_mebibytes("VmRSS")


def _peak_mebibytes() -> float:
    """Return the peak memory of this process since the peak was reset."""
    return _status_mebibytes("VmHWM")


def _status_mebibytes(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def _death_of(status: int, log: Path) -> str:
    """Return how a process ended, and where it was, from faulthandler's output."""
    frames = list(_FRAME.finditer(log.read_text(errors="replace")))
    ours = next((frame for frame in frames if is_ours(frame[1])), None)
    at = f" at {Path(ours[1]).name}:{ours[2]} {ours[3]}" if ours else ""
    inner = f" in {Path(frames[0][1]).name} {frames[0][3]}" if frames else ""
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}{at}{inner}"
    return (
        f"no end{at}{inner}" if frames else f"exit {os.WEXITSTATUS(status)}: {log.read_text(errors='replace')[-300:]}"
    )


def _make(folder: Path) -> None:
    """Make the specimens in another process, because this one forks and must have no threads."""
    process = os.fork()
    if process == 0:
        try:
            Specimens.make(folder)
        finally:
            os._exit(sys.exc_info()[0] is not None)
    if os.waitpid(process, 0)[1]:
        sys.exit("the specimens cannot be made")


def main() -> None:
    request = json.loads(sys.stdin.readline())
    folder = Path(request["folder"])
    _make(folder)
    limits = Limits(**request["limits"])
    _limit_memory(limits)  # of the processes that are forked, too
    server = Server(limits=limits, folder=folder)
    cases = [
        Case(kind=kind, seed=request["seed"], number=number)
        for kind, numbers in request["cases"].items()
        for number in numbers
    ]
    verdicts = list(server.serve(cases))
    known: set[tuple[str, str]] = set()
    with (folder / ANSWERS).open("w") as answers:
        for case, verdict in zip(cases, verdicts, strict=True):
            answer = {"kind": case.kind, "case": str(case), **verdict}
            if verdict["verdict"] == "fault":
                key = case.kind, signature(verdict["why"])
                answer |= {"signature": key[1], **({} if key in known else _smallest(server, case, key[1]))}
                known.add(key)
            answers.write(f"{json.dumps(answer)}\n")


def signature(why: str) -> str:
    """Return error and place; faults with equal signatures count as one."""
    return re.sub(r"\d+(\.\d+)? (s|MiB)\b", "N", why.partition(": ")[0] if " at " in why else why)[:120]


def _smallest(server: Server, case: Case, wanted: str) -> dict[str, Any]:
    """Return the case with as few mutations as possible that shows the same fault."""
    for smaller in case.smaller():
        (verdict,) = server.serve([smaller])
        if verdict["verdict"] == "fault" and signature(verdict["why"]) == wanted:
            return _smallest(server, smaller, wanted)
    return {"case": str(case), "mutations": case.files(Specimens(server.folder).of(case.kind))[1]}


if __name__ == "__main__":
    main()
