"""The benchmark of devices runs from start to end on a pretended one, and writes nothing about it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.cases import compiled
from benchmarks.devices import page
from benchmarks.devices.models import make_example, with_model
from benchmarks.devices.target import pretended_target
from benchmarks.output.result import at_least
from tests.values.search import COSTS
from trials.costs.layer_costs import LoadCost

ROOT = Path(__file__).parents[2]
PRETENDED = pretended_target()
ROWS = [{"part": "parity", "dtype": "float32", "holds": 1.0}, {"part": "large", "gain": 1.5}]


def benchmark(*arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit code, output) of the benchmark on a pretended device; its page stays as it is."""
    before = page.PAGE.read_text()
    command = [sys.executable, "-m", "benchmarks.gpu", "--pretend", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert ended.stdout, ended.stderr
    assert page.PAGE.read_text() == before
    found: dict[str, Any] = json.loads(ended.stdout)
    return ended.returncode, found


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_parts_run_on_a_pretended_device() -> None:
    _, found = benchmark()
    assert [row["part"] for row in found["rows"]] == [
        "device", *["parity"] * 8, *["kernels"] * 4, *["predictions"] * 11, "tuning", "tuning", "large",
        *["compiled"] * 8, *["rivals"] * 5,
    ]  # fmt: skip
    without = [check["name"] for check in found["checks"] if check["value"] is None]
    assert without == ["training over the plain packed loop, without a memory limit"]  # all CPU ranks have one
    held = {check["name"]: check["holds"] for check in found["checks"]}
    # The other bars are about times, which say nothing on a busy CPU.
    for name in (
        "parity: certificates that hold",
        "relative error of a kernel",
        "plans that failed",
        "relative error of the predicted peak bytes",
        "graphs of layers that are compiled after the warm-up",
        "parts that ran",
    ):
        assert held[name], found


@pytest.mark.long
def test_parts_that_do_not_begin_in_time_fail_the_benchmark() -> None:
    code, found = benchmark("--minutes", "0")
    assert code == 1
    assert [row["part"] for row in found["rows"]] == ["device"]
    assert not any(check["holds"] for check in found["checks"])


@pytest.mark.parametrize(("workers", "waits"), [(0, True), (4, False)])
def test_predictions_count_the_processes_that_load_packs(
    workers: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = replace(COSTS, loading=LoadCost(pixels_seconds=(0.0, 1.0, 0.0, 0.0)))
    monkeypatch.setattr(gpu, "profile_layers", lambda *_: costs)
    prepared: Any = SimpleNamespace(
        job=SimpleNamespace(data=SimpleNamespace(workers=workers)),
        workload=SimpleNamespace(model=SimpleNamespace(element_bytes=2)),
        epoch=None,
    )
    no_pool: Any = None
    assert any(gpu.profiled(prepared, no_pool, Path()).costs.loading.pixels_seconds) == waits


@pytest.mark.long
@pytest.mark.ranks
def test_predictions_stand_beside_runs(tmp_path: Path) -> None:
    target = replace(PRETENDED, devices=1, drawn_plans=0)
    plain, recomputed = gpu.predictions(target, make_example(tmp_path / "example", target.samples))
    assert plain["completed"] == recomputed["completed"] == 1
    assert max(plain["byte_error"], recomputed["byte_error"]) < gpu.BYTE_ERROR
    assert recomputed["peak_bytes"] < plain["peak_bytes"]
    assert 0 < plain["flop_utilisation"] < 1
    held = {check.name: check.holds for check in gpu.checks_of([{"part": "predictions", **plain}])}
    assert held["relative error of the predicted peak bytes"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it does itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles layers for a CPU with a C++ compiler")
def test_compiled_layers_have_the_gradients_of_plain_ones_and_few_graphs(tmp_path: Path) -> None:
    model = with_model(make_example(tmp_path / "example", PRETENDED.samples), PRETENDED.trained, "compiled")
    found = list(compiled.rows(model, "float32", torch.device("cpu"), PRETENDED.compiled, 2))
    assert [(row["layer"], row["graphs"] > 0) for row in found[:2]] == [("vision", True), ("language", True)]
    assert [(row["layer"], row["units"], row["tokens"]) for row in found[2:]] == [
        ("vision", 3, 0), ("vision", 1, 0), ("vision", 5, 0),
        ("language", 0, 40), ("language", 0, 50), ("language", 0, 90),
    ]  # fmt: skip
    assert all(check.holds for check in compiled.checks_of(found, "float32")), found


# --- the page ---


def test_numbers_of_a_pretended_device_are_never_written(tmp_path: Path) -> None:
    path = tmp_path / "gpu.md"
    with pytest.raises(ValueError, match="pretended device"):
        page.write(PRETENDED, ROWS, [], path)
    assert not path.exists()


def test_the_page_names_the_device_and_has_every_row(tmp_path: Path) -> None:
    path = tmp_path / "gpu.md"
    checks = [at_least("gain", [1.5], 1.0), at_least("steps", [], 1.0)]
    page.write(replace(PRETENDED, name="Example 9000", devices=4, pretended=False), ROWS, checks, path)
    text = path.read_text()
    assert text.startswith("# GPU: Example 9000\n")
    assert "4 x Example 9000" in text
    assert "| gain | 1.5 | 1 | yes |" in text
    assert "| steps | none | 1 | no |" in text
    assert '{"dtype": "float32", "holds": 1.0}' in text
    assert text.count("```json") == 2


def test_without_a_device_the_benchmark_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="no CUDA device is visible to torch; `--pretend`"):
        gpu.main()
