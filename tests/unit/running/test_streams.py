"""A closed or blocked stderr ends no work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TELL = """
import logging, sys, warnings
from rich.console import Console
from functools import partial
from autotune.cli.context import guarded

@partial(guarded, starts_ranks=False)
def command(options):
    for _ in range(2):
        options.display.show("a line")
        logging.getLogger("autotune").warning("a log record")
        warnings.warn("a warning")
        Console(stderr=True).print("a line of rich's")
        print("x" * 100_000, file=sys.stderr)
    options.give(lambda: {}, lambda: "done")
    print("left for the flush at exit", end="", file=sys.stderr)

command(as_json=False, db=None, verbose=0, quiet=False)
"""
HOLD = """
import os, sys
from trials import streams

streams.hold_descriptors()
sys.exit(os.open(sys.argv[1], os.O_RDONLY) <= 2)
"""


def python(script: str, *arguments: str | Path, redirect: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {redirect}', "bash", sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "redirect",
    [
        pytest.param("2>&-", id="closed"),
        pytest.param("2>/dev/full", id="full disk"),
        pytest.param("2> >(exec true)", id="reader left", marks=pytest.mark.long),
    ],
)
def test_work_continues_when_stderr_is_closed_or_full(redirect: str) -> None:
    done = python(TELL, redirect=redirect)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_line_is_dropped_rather_than_waited_for_when_a_pipe_does_not_block() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    script = [sys.executable, "-c", TELL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(script, env=environment, stdout=subprocess.PIPE, stderr=write, timeout=60, check=False)
    os.close(write)
    os.close(read)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    assert python(HOLD, __file__, redirect="<&- >&- 2>&-").returncode == 0


def test_what_is_read_arrives_whole_and_in_order() -> None:
    done = python(TELL, redirect="2>&1 >/dev/null")
    assert done.stdout.count("a line\n") == done.stdout.count("WARNING: a log record\n") == 2
    assert done.stdout.endswith("left for the flush at exit")
