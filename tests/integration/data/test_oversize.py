"""Samples above the capacities of a plan that is launched: the job is refused before ranks start, or says how many."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from autotune import PackSampler, SampleDataset
from autotune.certification.certify import certify
from autotune.cli import main
from autotune.training.full_training import launch
from tests.programs.users import JobFile, refusal
from tests.values.training import job_of, plan_of, prepared_of
from trials import wire
from trials.data.index import DatasetIndex
from trials.errors import DataError
from trials.plan import Packed, Plan

pytestmark = pytest.mark.usefixtures("home")
UNUSED: Any = None
"""In the place of what starts ranks"""


def narrow(index: DatasetIndex) -> tuple[Plan, int]:
    """Return a plan whose packs are too small for some samples, and for how many."""
    qt = int(np.quantile(index.text_tokens, 0.9))
    packing = Packed(qv=int(index.vision_units.max()), qt=qt, qv_min=0, qt_min=0)
    return plan_of("12+8", packing=packing), int((index.text_tokens > qt).sum())


@pytest.mark.parametrize("certifies", [True, False])
def test_a_sample_that_must_not_be_above_is_refused_before_ranks_start(
    example: Path, tmp_path: Path, certifies: bool
) -> None:
    prepared = prepared_of(example, tmp_path, data={"oversize": "fail"})
    plan, above = narrow(prepared.index)
    known: Any = {"site": UNUSED, "promised_samples_per_second": None, "max_steps": None}
    started: Any = partial(certify, prepared, plan, tmp_path, UNUSED)
    if not certifies:
        started = partial(launch, prepared, plan, UNUSED, UNUSED, tmp_path, **known)
    with pytest.raises(DataError, match=rf"above the pack's qv=\d+ qt=\d+, as in {above} samples; raise the capacitie"):
        started()


def test_a_launch_says_how_many_samples_a_plan_leaves_out(
    job: JobFile, example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = prepared_of(example, tmp_path).index
    plan, above = narrow(index)
    file = tmp_path / "plan.json"
    file.write_text(wire.encode(plan))
    job.spoil(data__oversize="skip")
    result = CliRunner().invoke(main, ["launch", str(job.path), "--plan", str(file), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert f"plan {plan.id} leaves out {above} of {len(index)} samples, which are above its qv and qt" in caplog.text
    job.spoil(data__oversize="fail")
    code, message = refusal("launch", job.path, "--plan", file, "--dry-run")
    assert (code, f"as in {above} samples; raise the capacities or set data.oversize" in message) == (1, True)


def test_a_loop_of_ones_own_says_how_many_samples_a_plan_leaves_out(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = SampleDataset(job_of(example, tmp_path / "output", data={"oversize": "skip"}))
    plan, above = narrow(samples.index)
    left_out = f"leaves out {above} of {len(samples)} samples, which are above its qv and qt (data.oversize: skip)"
    for ranks, given, name in ((2, plan, f"plan {plan.id}"), (1, plan.packing, "the packing")):
        caplog.clear()
        packs = [list(PackSampler(samples, given, rank=rank, ranks=ranks)) for rank in range(ranks)]
        assert sum(len(pack) for of_rank in packs for pack in of_rank) == len(samples) - above
        assert caplog.messages.count(f"{name} {left_out}") == 1
