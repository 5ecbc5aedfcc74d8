"""A profile of the example's layers, files with it and with a plan, and trials that ran."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.forecast.profile_file import ProfiledCosts
from autotune.job_file import load_job
from autotune.machine.hardware import software
from autotune.model_shape import model_shape
from tests.programs.users import JobFile
from tests.values.forecast import Trials
from tests.values.search import COSTS
from tests.values.storage import NOON, WORKLOAD
from trials import wire
from trials.costs.layer_costs import LayerCosts, LinkCost
from trials.plan import Plan


@pytest.fixture
def costs(job: JobFile) -> LayerCosts:
    job.spoil(hardware={"devices": 2, "memory_limit": "200MiB"})
    return replace(COSTS, link=LinkCost(latency_seconds=1e-3, seconds_per_byte=1e-9))


@pytest.fixture
def profiled(job: JobFile, costs: LayerCosts) -> ProfiledCosts:
    """Profile of the example's model on devices that are not here."""
    return ProfiledCosts(
        hardware=replace(WORKLOAD.hardware, devices=2),
        model=model_shape(load_job(job.path).model),
        software=software(),
        created=NOON,
        costs=costs,
    )


@pytest.fixture
def profile(profiled: ProfiledCosts, tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(wire.encode(profiled))
    return path


@pytest.fixture
def in_bfloat16(job: JobFile, profiled: ProfiledCosts, profile: Path) -> None:
    """The job and its profile in bfloat16, without which some trainers have no packs."""
    job.spoil(model__dtype="bfloat16")
    profile.write_text(wire.encode(replace(profiled, model=model_shape(load_job(job.path).model))))


@pytest.fixture
def trials(example: Path, tmp_path: Path, costs: LayerCosts) -> Trials:
    return Trials(example, tmp_path / "trials", costs)


@pytest.fixture
def exported(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Export a plan to a trainer, and return the command's document with the new folder."""

    def run(trainer: str, plan: Plan, *options: str | Path) -> tuple[dict[str, Any], Path]:
        out = tmp_path / f"exported-{len(list(tmp_path.glob('exported-*')))}"
        arguments = (job.path, "--to", trainer, "--device-profile", profile, "--plan", plan_file(plan), "--out", out)
        answer = CliRunner().invoke(main, ["export", *map(str, (*arguments, *options)), "--json"])
        assert answer.exit_code == 0, answer.stderr
        document: dict[str, Any] = json.loads(answer.stdout)
        assert sorted(path.name for path in out.iterdir()) == document["files"]
        return document, out

    return run
