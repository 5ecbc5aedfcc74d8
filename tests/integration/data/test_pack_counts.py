"""What `autotune pack INPUT` counts: samples on both sides, and the cost of a sample."""

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from autotune import job_file
from autotune.cli import main
from autotune.job_file import load_job
from autotune.packing.balance import balanced
from autotune.packing.material import PackOptions, read_material
from autotune.packing.packing_report import pack_document, pack_text
from tests.programs.users import JobFile, document
from tests.values.data import write_lengths
from trials import wire

pytestmark = pytest.mark.usefixtures("home")


def test_samples_that_are_skipped_count_on_neither_side(tmp_path: Path) -> None:
    rows = [(1 + number % 3, 100 + 7 * number) for number in range(64)]
    some, every = (tmp_path / "some.json", tmp_path / "every.json")
    asked = ("--qv", "9", "--qt", "1024", "--oversize", "skip", "--data-parallel", "2", "--global-batch", "8")
    expected = document("pack", write_lengths(some, rows), *asked)
    found = document("pack", write_lengths(every, [*rows, (3, 8000)]), *asked)
    assert found["oversize"]["samples"] == found["after"]["skipped"] == 1
    assert found["before"] == expected["before"]


def test_samples_that_are_held_out_do_not_count_as_cut(job: JobFile) -> None:
    data = {**load_job(job.path).data.model_dump(mode="json"), "oversize": "truncate", "max_tokens": 40}
    job.spoil(data=data, evaluation={"samples": 0.5})
    index = read_material(job_file.JobFile(path=job.path), PackOptions()).index
    cut = np.count_nonzero(index.text_tokens == 40)
    asked = ("--qv", "10", "--qt", "500", "--data-parallel", "1")
    assert document("pack", job.path, *asked)["cut"] == {"max_tokens": 40, "samples": cut}
    output = CliRunner().invoke(main, ["pack", str(job.path), *asked]).stdout
    assert f"{cut:,} of {len(index):,} samples have 40 tokens: longer ones were cut to that:" in output


def test_packs_are_matched_by_what_a_job_trains_and_compared_by_its_forward_pass(job: JobFile) -> None:
    wanted = PackOptions(qv=10, qt=500)
    whole, frozen = (
        balanced(read_material(job_file.JobFile(path=job.path, changes=changes), wanted), wanted)
        for changes in ((), ("training.freeze=[vision]",))
    )
    matching, other = (each.material.settings.weights for each in (whole, frozen))
    assert other.unit < matching.unit
    assert other.token == matching.token
    assert frozen.before.sample_flops == whole.before.sample_flops == whole.before.balance.cost_per_sample
    assert frozen.before.balance.cost_per_sample < whole.before.balance.cost_per_sample
    shown = pack_document(frozen)
    before, flops = shown["before"], shown["before"]["forward_flops_per_sample"]
    assert flops == whole.before.sample_flops
    assert before["cost_per_sample"] == before["cost"] * before["data_parallel"] / before["samples"] < flops
    assert shown["cost_model"]["forward"] == wire.to_document(matching)
    assert re.search(rf"cost of a sample +FLOP, with waiting +{flops / 1e6:.3g} M", pack_text(frozen))


def test_where_no_capacities_keep_the_global_batch_the_reason_says_so(lengths: Path) -> None:
    reason = document("pack", lengths, "--data-parallel", "64", "--global-batch", "32")["reason"]
    assert reason.endswith(
        "though none keeps the global batch within 10 % as a search asks; give another global batch, or fewer ranks"
    )
    assert "though" not in document("pack", lengths)["reason"]
