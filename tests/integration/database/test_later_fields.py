"""A later version, whose stored types have one more field each, finds all that this one stored."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storage.store import open_store
from tests.values.storage import packed_plan

ROOT = Path(__file__).parents[3]
ASSETS = ROOT / "tests" / "assets"
TYPES = ("trials/plan.py", "trials/workload.py", "trials/outcome.py")
RECORDS = {
    "records.py": ("Baseline", "ParetoPlan"),
    "explanation.py": ("TimePart", "PlanTime", "ChangeEffect", "Explanation"),
}
COLUMNS = {
    "HARDWARE": "hardware",
    "MODEL": "modelshape",
    "DATA_PROFILE": "dataprofile",
    "WORKLOAD": "software",
    "LAYER_PROFILE": "software",
    "PLAN": "layout",
    "STAGE_MEASUREMENT": "stagemeasurement",
}
MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9999", {head!r}


def upgrade():
    for table, column in {columns!r}:
        op.add_column(table, sa.Column(column, sa.BigInteger(), nullable=False, server_default=sa.text("0")))
"""
SCRIPT = """
import json, sys
from dataclasses import fields, replace
from pathlib import Path

from storage.upkeep.repair import repair
from storage.store import open_store
from trials import outcome, plan, workload

here = Path(sys.argv[1])
seen = {}
for file in sorted(here.glob("*.db")):
    for step in ("opened", "repaired"):
        with open_store(f"sqlite:///{file}") as store:
            assert store.revision == "9999"
            plans = {best.plan.id: store.find_plan(best.plan.id).workload.fingerprint for best in store.best_plans()}
            trials = sum(len(store.trials(study.id)) for study in store.studies())
            profiles = len(store.layer_profiles())
            problems = [str(problem) for problem in store.problems()]
        dropped = dict(repair(f"sqlite:///{file}").dropped)
        seen[f"{file.stem} {step}"] = [plans, trials, profiles, problems, dropped]
with open_store(f"sqlite:///{here}/taken-in.sqlite") as store:
    for bundle in sorted(here.glob("*.jsonl")):
        assert store.import_bundle(bundle).new and not store.import_bundle(bundle).new
    seen["bundles"] = [sorted({best.plan.id for best in store.best_plans()}), [str(each) for each in store.problems()]]
    best = store.best_plans()[0]
    other = replace(best.plan, layout=replace(best.plan.layout, later_layout=1))
    assert other.id != best.plan.id and workload.wire.decode(plan.Plan, other.document) == other
    model = replace(best.workload.model, later_modelshape=1)
    assert model.fingerprint != best.workload.model.fingerprint
print(json.dumps(seen))
"""


def add_field(path: Path, line: str, only: tuple[str, ...] | None = None) -> None:
    """Add a last field to each dataclass of a module."""
    lines, tree = path.read_text().splitlines(), ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and (only is None or node.name in only)]
    for node in reversed(classes):
        places = [number for number, part in enumerate(node.body) if isinstance(part, ast.AnnAssign)]
        after = node.body[places[-1] + 1 : places[-1] + 2]
        is_told = bool(after) and isinstance(after[0], ast.Expr)
        end = (after[0] if is_told else node.body[places[-1]]).end_lineno
        lines.insert(end or 0, f"    {line.format(name=node.name.lower())}")
    path.write_text("\n".join(lines))


def add_columns(path: Path) -> list[tuple[str, str]]:
    """Adds a last column to each table of `COLUMNS`; returns (table, column)."""
    lines, added = path.read_text().splitlines(), []
    for node in reversed(ast.parse(path.read_text()).body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.Constant(value=str(table)), *_])):
                if name in COLUMNS:
                    added.append((table, f"later_{COLUMNS[name]}"))
                    line = f'Column("{added[-1][1]}", Whole, nullable=False, server_default="0"),'
                    lines.insert((node.end_lineno or 0) - 1, f"    {line}")
    path.write_text("\n".join(lines))
    assert len(added) == len(COLUMNS)
    return added


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """The packages of a later version."""
    for name in ("trials", "storage"):
        shutil.copytree(ROOT / name, tmp_path / "later" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in TYPES:
        add_field(tmp_path / "later" / name, "later_{name}: int = 0")
    for name, classes in RECORDS.items():
        add_field(tmp_path / "later" / "storage" / name, "later_{name}: int = 0", classes)
    columns = add_columns(tmp_path / "later" / "storage" / "database" / "tables.py")
    versions = tmp_path / "later" / "storage" / "migrations" / "versions"
    head = max(path.stem[1:5] for path in versions.glob("r*.py"))
    (versions / "r9999_later.py").write_text(MIGRATION.format(head=head, columns=columns))
    return tmp_path / "later"


def test_a_field_that_a_later_version_adds_to_every_stored_type_loses_nothing(later: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(ASSETS / "databases", data)
    shutil.copy(ASSETS / "bundles" / "6.jsonl", data)
    shutil.copy(ASSETS / "databases" / "0100.db", tmp_path / "present.db")
    with open_store(f"sqlite:///{tmp_path / 'present.db'}") as store:
        trials = sum(len(store.trials(study.id)) for study in store.studies())
        plans = {best.plan.id: store.find_plan(best.plan.id).workload.fingerprint for best in store.best_plans()}
    seen = run(later, data)
    assert set(plans) == {packed_plan().id}
    for step in ("opened", "repaired"):
        assert seen[f"0100 {step}"] == [plans, trials, 2, [], {}]
    assert seen["bundles"] == [sorted(plans), []]


def run(later: Path, data: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(later)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, data], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
