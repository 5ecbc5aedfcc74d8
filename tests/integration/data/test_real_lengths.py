"""Packing on lengths of real datasets, or of some that are like them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.packing import load
from benchmarks.references import packers as reference
from tests.values.parameters import parameters
from trials.data.order import epoch_order
from trials.data.packs import build_packs
from trials.plan import Packed

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of length caches that `AUTOTUNE_TEST_LENGTHS` names, or one like OmniBal's of AI2D and ChartQA."""
    if (named := os.environ.get("AUTOTUNE_TEST_LENGTHS")) is not None:
        return Path(named)
    random = np.random.default_rng(0)
    units = random.choice([1, 3, 4, 5], 3000, p=[0.3, 0.4, 0.1, 0.2]).tolist()
    tokens = (256 * np.array(units) + random.lognormal(4, 0.7, len(units)).clip(30, 550)).astype(int).tolist()
    records = [
        {"vit_num": each, "token_num": count, "image_flags": each} for each, count in zip(units, tokens, strict=True)
    ]
    folder = tmp_path_factory.mktemp("lengths")
    (folder / "generated.json").write_text(json.dumps(records))
    return folder


@pytest.mark.parametrize(
    ("qv", "qt"),
    parameters({"11, 6144": (11, 6144), "15, 4096": (15, 4096), "18, 6144": (18, 6144)}, short=("15, 4096",)),
)
def test_no_reference_packer_needs_fewer_packs_than_cutting_stock(lengths: Path, qv: int, qt: int) -> None:
    index = load(lengths)
    packing = Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt - 128, packer="cutting-stock")
    packs = build_packs(index, epoch_order(index, 0, 0), packing, 0, "fail")
    units, tokens = index.vision_units.astype("int64"), index.text_tokens.astype("int64")
    others = (
        reference.isf(units, tokens, (qv, qt), 10),
        reference.first_fit_decreasing(units, tokens, (qv, qt)),
        reference.best_histogram(units, tokens, (qv, qt)),
    )
    assert len(packs) <= min(others)
    assert sorted(packs.samples.tolist()) == list(range(len(index)))


def test_the_benchmark_prints_machine_rows_and_checks(tmp_path: Path) -> None:
    records = [{"vit_num": 1 + n % 5, "token_num": 50 + n, "image_flags": 1 + n % 5} for n in range(400)]
    (tmp_path / "some.json").write_text(json.dumps(records))
    options = ["--lengths", str(tmp_path), "--qv", "10", "--qt", "4096", "--sizes", "--fuzz", "20", "--mixed", "0"]
    command = [sys.executable, "-m", "benchmarks.packing", *options]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    result = json.loads(done.stdout)
    checks = {check["name"]: check["holds"] for check in result["checks"]}
    assert list(result) == ["machine", "rows", "checks"]
    assert checks["packs of cutting-stock more than the fewest of the references"]
    assert checks["rows with every sample exactly once and within the capacities"]
    assert checks["wrongly packed random sets"]
    assert "seconds for 1270000 samples, any packer" not in checks, "what was left out has no bar"
    assert not checks["cost efficiency, 8 ranks"], "no row is full enough to hold it"
    assert done.returncode == 1
