"""Steps and ranks of an exported training: those of the job."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.draft.arguments import read_arguments
from autotune.job_file import load_job
from tests.programs.users import JobFile
from tests.values.forecast import IN_BFLOAT16
from tests.values.training import plan_of
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


@pytest.mark.usefixtures("in_bfloat16")
def test_packs_are_in_steps_of_the_ranks_of_the_plan_where_there_are_more_devices(exported: Exported) -> None:
    document, alike = exported("ms-swift", IN_BFLOAT16)
    plan = wire.decode(Plan, json.dumps(document["plan"]))
    assert plan.layout.data == 2
    document, out = exported("ms-swift", plan, "--devices", "4")
    assert document["plan_id"] == plan.id
    for name in ("train.jsonl", "sft.yaml"):
        assert (out / name).read_text() == (alike / name).read_text()
