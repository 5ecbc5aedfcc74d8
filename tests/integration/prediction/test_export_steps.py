"""Steps and ranks of an exported training: those of the job."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.draft.arguments import read_arguments
from autotune.forecast.profile_file import ProfiledCosts
from autotune.job_file import load_job
from tests.programs.users import JobFile, document, refusal
from tests.values.data import record, write_records
from tests.values.forecast import IN_BFLOAT16
from tests.values.training import PACKED, plan_of
from trials import wire
from trials.plan import Padded, Plan

Exported = Callable[..., tuple[dict[str, Any], Path]]
HELD_BY_ALL = plan_of("12+8r12,8", data=2, packing=Padded(samples=2))
SCRIPTS = {"ms-swift": "sft.yaml", "llama-factory": "sft.yaml", "internvl": "sft.sh"}

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize("trainer", SCRIPTS)
def test_steps_end_a_training_early_and_never_prolong_it(trainer: str, job: JobFile, exported: Exported) -> None:
    """The trainers would repeat the data until `max_steps` is reached."""
    for steps, written in (2, "2"), (10**6, None):
        job.spoil(training__max_steps=steps)
        _, out = exported(trainer, HELD_BY_ALL)
        arguments = read_arguments(out / SCRIPTS[trainer]).values
        assert int(arguments["num_train_epochs"]) == load_job(job.path).training.epochs
        found = arguments.get("max_steps")
        assert (found if found is None else str(found)) == written


def test_ranks_are_started_on_each_node_of_the_job(job: JobFile, exported: Exported) -> None:
    for hardware in {"devices": 2, "nodes": 2}, {"devices": 2, "hosts": ["a", "b"], "launcher": "torchrun"}:
        job.spoil(hardware=hardware | {"memory_limit": "200MiB"})
        found, _ = exported("ms-swift", HELD_BY_ALL)
        assert found["command"] == "NNODES=2 NPROC_PER_NODE=1 swift sft sft.yaml"
        assert any(
            note.startswith("Start it on each of the 2 nodes, with NODE_RANK from 0 to 1") for note in found["notes"]
        )
    found, _ = exported("llama-factory", HELD_BY_ALL)
    assert found["command"].startswith("FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=1 llamafactory-cli ")
    _, out = exported("internvl", HELD_BY_ALL)
    assert read_arguments(out / "sft.sh").devices == 2
    assert (
        '--nnodes 2 --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --nproc_per_node 1 '
        in (out / "sft.sh").read_text()
    )


def test_ranks_are_started_on_the_nodes_that_were_profiled(
    profiled: ProfiledCosts, profile: Path, exported: Exported
) -> None:
    profile.write_text(wire.encode(replace(profiled, hardware=replace(profiled.hardware, devices=4, nodes=2))))
    wide = replace(HELD_BY_ALL, layout=replace(HELD_BY_ALL.layout, data=4))
    for plan, command in (
        (wide, "NNODES=2 NPROC_PER_NODE=2 swift sft sft.yaml"),
        (HELD_BY_ALL, "NPROC_PER_NODE=2 swift sft sft.yaml"),
    ):
        found, _ = exported("ms-swift", plan, "--devices", "4")
        assert found["command"] == command


@pytest.mark.parametrize(("ranks", "possible"), [(5, "4 or 6"), (7, "6 or 8"), (13, "12 or 16")])
def test_ranks_that_cannot_be_equal_on_the_nodes_are_refused(
    ranks: int, possible: str, job: JobFile, profile: Path, plan_file: Callable[[Plan], Path]
) -> None:
    job.spoil(hardware={"devices": 8, "nodes": 2, "memory_limit": "200MiB"})
    plan = replace(HELD_BY_ALL, layout=replace(HELD_BY_ALL.layout, data=ranks), packing=Padded(samples=1))
    options = ("--plan", plan_file(plan), "--devices", str(ranks), "--device-profile", profile)
    code, error = refusal("export", job.path, "--to", "ms-swift", *options, "--out", profile.with_name("out"))
    assert code == 2
    assert f"the {ranks} ranks of the plan cannot be equal on " in error
    assert f"give --devices {possible}, or " in error


def test_a_profile_may_be_of_fewer_devices_than_the_job_has_nodes(job: JobFile, exported: Exported) -> None:
    job.spoil(hardware={"nodes": 4, "memory_limit": "200MiB"})
    found, _ = exported("ms-swift", HELD_BY_ALL)
    assert found["command"] == "NNODES=2 NPROC_PER_NODE=1 swift sft sft.yaml"


def test_a_script_in_a_folder_with_a_blank_is_started(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    out = tmp_path / "my run"
    options = ("--plan", plan_file(HELD_BY_ALL), "--device-profile", profile, "--out", out)
    found = document("export", job.path, "--to", "internvl", *options)
    assert shlex.split(found["command"]) == ["bash", str(out / "sft.sh")]


def test_internvl_makes_the_steps_of_the_packs_that_hold_the_longest_sample(
    job: JobFile, exported: Exported, tmp_path: Path
) -> None:
    """Its packer fills every pack up to the most images and the most tokens of any."""
    short = [record("Why?", "Yes.") for _ in range(30)]
    middle = [record("Why?", " ".join(map(str, range(12)))) for _ in range(30)]
    data = write_records(tmp_path / "mixed.jsonl", *short, *middle, record("Why?", " ".join(map(str, range(1500)))))
    job.spoil(data__sources=[{"path": str(data)}], data__oversize="own-pack", training__epochs=3)
    packing = replace(PACKED, sequence=1, qv=3, qv_min=3, qt=150, qt_min=150)
    found, out = exported("internvl", replace(HELD_BY_ALL, packing=packing))
    assert found["plan"]["packing"]["qt"] == 150
    arguments = read_arguments(out / "sft.sh").values
    lengths = sorted(json.loads(line)["length"] for line in (out / "train.jsonl").read_text().splitlines())
    images, tokens = (int(arguments[name]) for name in ("num_images_expected", "max_packed_tokens"))
    assert tokens == lengths[-1] + 64
    assert sum(lengths[-1 - images : -1]) < tokens  # only images close packs
    of_step = 2 * int(arguments["gradient_accumulation_steps"])
    steps, left = divmod(int(arguments["max_steps"]), 3)
    packs = math.ceil(60 / images) + 1
    assert (steps, left) == (math.ceil(packs / of_step), 0)
    packed, memory, *_ = found["left_out"]
    assert f"images and {tokens} tokens, about {packs} packs of an epoch where the plan has " in packed
    assert f"packs of at most 150 tokens: each may have the {tokens} of the longest sample there" in memory


@pytest.mark.usefixtures("in_bfloat16")
def test_packs_are_in_steps_of_the_ranks_of_the_plan_where_there_are_more_devices(exported: Exported) -> None:
    found, alike = exported("ms-swift", IN_BFLOAT16)
    plan = wire.decode(Plan, json.dumps(found["plan"]))
    assert plan.layout.data == 2
    found, out = exported("ms-swift", plan, "--devices", "4")
    assert found["plan_id"] == plan.id
    for name in ("train.jsonl", "sft.yaml"):
        assert (out / name).read_text() == (alike / name).read_text()
