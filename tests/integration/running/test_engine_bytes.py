"""Weights, gradients and optimizer states take the predicted bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rank_bytes
from tests.training_values import plan_of, prepared_of
from trials import wire
from trials.plan import Padded, ZeroStage
from trials.tasks.request import Training

pytestmark = pytest.mark.ranks

ZEROS: tuple[ZeroStage, ...] = (0, 1, 2, 3)
DATA_PARALLEL = [("float32", zero) for zero in ZEROS] + [("bfloat16", zero) for zero in ZEROS[1:]]
ONE = Padded(samples=1)
CASES = [(dtype, plan_of("4+2", data=2, zero=zero, packing=ONE)) for dtype, zero in DATA_PARALLEL] + [
    ("bfloat16", plan_of("3+0", "1+2", zero=1, packing=ONE))
]


def test_every_zero_stage_holds_its_static_bytes(wide_shallow: Path, tmp_path: Path) -> None:
    files = []
    for number, (dtype, plan) in enumerate(CASES):
        folder = tmp_path / str(number)
        prepared = prepared_of(wide_shallow, folder, model={"dtype": dtype}, training={"global_batch_samples": 2})
        files.append(folder / "request.json")
        files[-1].write_text(wire.encode(prepared.request(plan, Training(output=folder))))
    for lines in bytes_on_two_ranks(files, tmp_path):
        assert len(lines) == len(CASES)
        for (dtype, plan), line in zip(CASES, lines, strict=True):
            sizes = json.loads(line)
            # Beyond the formula: a tensor across the border of two ranks' shares is held by both.
            assert 0 <= sizes["held"] - sizes["whole"] - sizes["expected"] <= 0.04 * sizes["expected"], (dtype, plan)


def bytes_on_two_ranks(files: list[Path], folder: Path) -> list[list[str]]:
    """Return what each rank prints."""
    outputs = [folder / f"rank-{rank}.txt" for rank in (0, 1)]
    ranks = []
    for rank, output in enumerate(outputs):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        command = [sys.executable, rank_bytes.__file__, *map(str, files)]
        with output.open("w") as file:
            ranks.append(subprocess.Popen(command, env=environment, stdout=file))
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [[line for line in output.read_text().splitlines() if line.startswith("{")] for output in outputs]
