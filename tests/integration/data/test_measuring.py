"""Measuring in several processes gives the same results as in one, and leaves no process behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.data.test_cache import assert_equal
from tests.programs.measurers import Dying, Slow, Unloadable, Words
from tests.programs.processes import children, wait_for, wait_for_the_end
from tests.values.data import record, write_records
from tests.values.parameters import parameters
from trials.data import measuring
from trials.data.index import DatasetIndex
from trials.data.indexing import IndexReport, build_index
from trials.data.records import file_chunk
from trials.data.records.sample import Measurer
from trials.errors import DataError, ModelError, TrialsError
from trials.job import DataSection
from trials.model.families import internvl

RECORDS = 24
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes are started for the second of many small chunks."""
    monkeypatch.setattr(measuring, "_START_SECONDS", -1.0)
    monkeypatch.setattr(file_chunk, "CHUNK_RECORDS", 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [record("Who?", "word " * (number + 1)) for number in range(RECORDS)]
    write_records(tmp_path / "a.jsonl", *lines[:10], {"conversations": []}, *lines[10:18], b"{", *lines[18:])
    return tmp_path


def index(folder: Path, measurer: Measurer, workers: int, **changes: Any) -> tuple[DatasetIndex, IndexReport]:
    data = DataSection.model_validate({"sources": [{"path": "a.jsonl"}], **changes})
    return build_index(data, measurer, folder, workers=workers)


@pytest.mark.parametrize("reads_a_model", [False, pytest.param(True, marks=pytest.mark.long)])
def test_several_processes_give_the_results_of_one_in_the_same_order(
    folder: Path, example: Path, reads_a_model: bool
) -> None:
    measurer = internvl.encoder(str(example / "model")) if reads_a_model else Words()
    (alone, report), (together, reports) = (index(folder, measurer, workers) for workers in (1, 2))
    assert_equal(alone, together)
    assert report == reports
    assert [line.place[1] for line in report.bad_lines] == [11, 20]
    assert not multiprocessing.active_children()


def test_the_first_bad_line_in_the_file_is_the_one_that_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:11: "):
        index(folder, Slow(), 2, on_error="fail")
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("measurer", "error", "message"),
    [
        (Dying(), DataError, "a process that measures samples was killed, perhaps for lack of memory"),
        (Unloadable(), ModelError, "the model is gone"),
    ],
)
def test_what_goes_wrong_in_a_process_comes_back_as_an_error(
    folder: Path, measurer: Words, error: type[TrialsError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        index(folder, measurer, 2)
    assert "Traceback" not in str(caught.value)
    assert not multiprocessing.active_children()


def test_a_short_reading_starts_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_START_SECONDS", 10.0)
    monkeypatch.setattr(measuring, "_in_pool", None)
    assert len(index(folder, Words(), 2)[0]) == RECORDS


UNGUARDED = """
import sys
from pathlib import Path
from tests.programs.measurers import Words
from trials.data import measuring
from trials.data.records import file_chunk
from trials.data.indexing import build_index
from trials.job import DataSection

measuring._START_SECONDS, file_chunk.CHUNK_RECORDS = -1.0, 3
data = DataSection.model_validate({"sources": [{"path": "a.jsonl"}]})
print(len(build_index(data, Words(), Path(sys.argv[1]), workers=2)[0]))
"""


def test_a_script_without_a_guard_is_not_run_again_by_the_processes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    command: list[str | Path] = [sys.executable, tmp_path / "script.py", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{RECORDS}\n", "")


SCRIPT = """
import sys
from pathlib import Path
from tests.programs.measurers import Stuck
from trials.data import measuring
from trials.data.records import file_chunk
from trials.data.indexing import build_index
from trials.job import DataSection

if __name__ == "__main__":
    measuring._START_SECONDS, file_chunk.CHUNK_RECORDS = -1.0, 3
    data = DataSection.model_validate({"sources": [{"path": "a.jsonl"}]})
    try:
        build_index(data, Stuck(), Path(sys.argv[1]), workers=2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def to_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def to_parent(process: subprocess.Popen[str]) -> None:
    process.kill()


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize(
    ("stop", "code", "delay"),
    parameters(
        {
            "Ctrl-C, starting": (to_group, 130, 0.4),
            "Ctrl-C, measuring": (to_group, 130, 1.0),
            "killed, starting": (to_parent, -signal.SIGKILL, 0.4),
            "killed, measuring": (to_parent, -signal.SIGKILL, 1.0),
        },
        short=("Ctrl-C, measuring", "killed, starting"),
    ),
)
def test_no_process_outlives_the_one_that_reads(
    folder: Path, tmp_path: Path, stop: Callable[[subprocess.Popen[str]], None], code: int, delay: float
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", folder],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(children(process.pid)) >= 3)  # two, and the tracker of multiprocessing's own resources
    time.sleep(delay)
    started = children(process.pid)
    stop(process)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in errors
    wait_for_the_end(started)
