"""Escape sequences in imported names have no effect on a terminal."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.cli.visible import VisibleFormatter, visible
from storage.store import open_store
from tests.values.storage import WORKLOAD, best_of, concluded, packed_plan, result_of
from trials.outcome import Rejected

ESCAPES = "\x1b]0;pwned\x07\x1b[31m\x9b2J\u202e\x7f"
SHOWN = r"\x1b]0;pwned\x07\x1b[31m\x9b2J\u202e\x7f"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of another database, with escape sequences in names, reasons and source."""
    model = replace(WORKLOAD.model, name=f"model{ESCAPES}")
    hardware = replace(WORKLOAD.hardware, device_name=f"device{ESCAPES}")
    workload = replace(WORKLOAD, model=model, hardware=hardware)
    path = tmp_path / "bundle.jsonl"
    with open_store(f"sqlite:///{tmp_path / 'there.db'}") as store:
        study = store.create_study(store.add_workload(workload), {}, seed=0)
        rejected = result_of(store.start_trial(study.id, packed_plan(), f"role{ESCAPES}").id, Rejected(reason=ESCAPES))
        store.finish_trial(rejected)
        concluded(store, best_of(study.id, workload=workload))
        path.write_text("".join(store.export_studies([study.id], f"host{ESCAPES}")))
    return path


@pytest.mark.usefixtures("home")
def test_escape_sequences_of_an_imported_bundle_are_shown_and_never_obeyed(bundle: Path) -> None:
    plan = packed_plan().id
    output = ""
    for command in (["db", "import", str(bundle)], ["plans"], ["studies"], ["studies", "model"], ["show", plan]):
        answer = CliRunner().invoke(main, command)
        assert answer.exit_code == 0, answer.output
        assert not set(answer.output) & set("\x1b\x07\x9b\u202e\x7f"), command
        output += answer.output
    assert all(f"{name}{SHOWN}" in output for name in ("model", "device", "role", "host"))
    document = json.loads(CliRunner().invoke(main, ["plans", "--json"]).stdout)
    assert document["plans"][0]["workload"]["model"]["name"] == f"model{ESCAPES}"


def test_a_warning_is_written_so_that_nothing_in_it_is_obeyed() -> None:
    record = logging.LogRecord("storage", logging.WARNING, "", 0, "left out %s", (ESCAPES,), None)
    assert VisibleFormatter("%(levelname)s: %(message)s").format(record) == f"WARNING: left out {SHOWN}"


def test_text_for_people_stays_as_it_is() -> None:
    text = "Qv 8 +- 0.1 \u96ea \U0001f600\n\tsecond line"
    assert visible(text) == text
