"""All ranks of a training see one output folder, not copies of it."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.training.test_training_output import SETTINGS, write_checkpoint
from tests.values.training import plan_of
from trials.errors import OutputTaken
from trials.tasks.training.output import RECORD_FILE, open_output
from trials.tasks.training.training import record_digest, shared_record


def test_a_rank_that_sees_a_copy_of_the_output_is_refused(tmp_path: Path) -> None:
    first, second = plan_of("4+2"), plan_of("3+0", "1+2")
    shared, copy, empty = (tmp_path / name for name in ("shared", "copy", "empty"))
    opened = open_output(shared, replace(SETTINGS, plan=first.id), first)
    write_checkpoint(shared, opened, 2)
    shutil.copytree(shared, copy)
    changed = open_output(shared, replace(SETTINGS, plan=second.id), second, instead_of=first).record
    assert shared_record(shared, record_digest(changed)) == changed
    for folder, why in ((copy, "another"), (empty, "no")):
        expected = f"{folder} is not the folder that rank 0 has opened: it has {why} autotune.json; name one"
        with pytest.raises(OutputTaken, match=expected):
            shared_record(folder, record_digest(changed), patience_seconds=0.0)


def test_a_record_that_a_network_file_system_shows_late_is_waited_for(tmp_path: Path) -> None:
    plan = plan_of("4+2")
    record = open_output(tmp_path / "shared", replace(SETTINGS, plan=plan.id), plan).record
    late = tmp_path / "late"
    late.mkdir()
    shown = threading.Timer(0.7, (tmp_path / "shared" / RECORD_FILE).rename, (late / RECORD_FILE,))
    shown.start()
    assert shared_record(late, record_digest(record)) == record
    shown.join()
