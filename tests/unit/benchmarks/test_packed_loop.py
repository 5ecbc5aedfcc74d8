"""The plain packed loop takes the samples that autotune takes, and packs each once."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import varlen

from benchmarks.references.kept_bytes import static_bytes
from benchmarks.references.loop_data import Data
from benchmarks.references.packed_loop import Run, variants
from benchmarks.references.packs_by_hand import attend_to, first_fit_decreasing, packed_flash, per_sample
from benchmarks.references.precision import Optimizer
from tests.machines import varlen as stand_in
from tests.values.training import prepared_of
from trials.data.loader import encode
from trials.model.inputs.encoders import load_encoder


@given(lengths=st.lists(st.integers(1, 50), max_size=40), capacity=st.integers(1, 60))
def test_each_sample_is_packed_once_and_no_pack_of_several_is_too_long(lengths: list[int], capacity: int) -> None:
    packs = first_fit_decreasing(lengths, capacity)
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    assert all(len(pack) == 1 or sum(lengths[number] for number in pack) <= capacity for pack in packs)


def test_tokens_labels_and_pixels_are_those_of_a_training(example: Path, tmp_path: Path) -> None:
    prepared = prepared_of(example, tmp_path)
    encoder = load_encoder(prepared.job.model, prepared.job.data)
    data = Data(str(example / "model"), str(example / "data" / "train.jsonl"))
    assert len(data.samples) == len(prepared.index)
    for row, sample in enumerate(data.samples[:12]):
        expected = encode(prepared.index, row, encoder, pixels=True)
        assert sample.ids == expected.input_ids.tolist()
        assert sample.labels == [*expected.labels[1:].tolist(), -100]
        if expected.pixel_values is None:
            assert not sample.images
        else:
            pixels, _ = data.pixels(sample.images)
            np.testing.assert_array_equal(pixels.numpy(), expected.pixel_values)


def test_the_loop_imports_nothing_of_autotune() -> None:
    folder = Path(__file__).parents[3] / "benchmarks" / "references"
    sources = [
        folder / f"{name}.py" for name in ("packed_loop", "loop_data", "kept_bytes", "packs_by_hand", "precision")
    ]
    lines = [line for source in sources for line in source.read_text().splitlines()]
    assert not [line for line in lines if line.startswith(("from trials", "from autotune"))]


def test_one_call_for_all_samples_attends_as_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", stand_in.varlen_attn)
    lengths, ends = [3, 1, 5], torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    attend_to(lengths, ends)
    expected, _ = per_sample(None, query, key, value, scaling=0.3)
    found, _ = packed_flash(None, query, key, value, scaling=0.3)
    torch.testing.assert_close(found, expected)
    # Images have windows of their own, and look both ways.
    windows, _ = packed_flash(None, query, key, value, scaling=0.3, cu_seq_lens_q=ends, max_length_q=5)
    assert not torch.allclose(windows, expected)


def test_small_updates_add_up_in_the_float32_copies() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], learning_rate=1e-3, weight_decay=0.0)
    for _ in range(10):  # each is lost in bfloat16, whose next number below 1 is 0.996
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert weight.grad is None
    torch.testing.assert_close(weight.float(), torch.full((4,), 0.99), rtol=4e-3, atol=0)
    with torch.no_grad():
        weight.fill_(2.0)
    optimizer.forget()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("limit", "recomputed", "expected"),
    [
        (None, None, [(0, 0)]),
        (1 << 30, None, [(0, 0), (12, 0), (12, 8)]),
        (1 << 30, (3, 1), [(3, 1)]),
    ],
)
def test_a_limit_makes_the_loop_try_each_switch_of_recomputation(
    limit: int | None, recomputed: tuple[int, int] | None, expected: list[tuple[int, int]]
) -> None:
    run = Run(model="", data="", progress="", lengths=(7, 5), memory_limit=limit, recomputed=recomputed)
    assert list(variants(run, (12, 8))) == [(length, layers) for length in (7, 5) for layers in expected]


def test_shards_leave_a_rank_its_part_and_one_layer_as_a_whole() -> None:
    layers = [nn.Linear(3, 3, bias=False), nn.Linear(5, 4, bias=False)]
    model = nn.Sequential(*layers, nn.Linear(1, 1, bias=False))
    assert static_bytes(model, layers, ranks=1) == 30 * 16
    assert static_bytes(model, layers, ranks=2) == 30 * 16 // 2 + 20 * 8
    layers[0].requires_grad_(False)
    assert static_bytes(model, layers, ranks=1) == 21 * 16


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [(0, 0), (12, 8)])
def test_shards_change_no_loss(example: Path, tmp_path: Path, recomputed: tuple[int, int]) -> None:
    given = {
        "model": str(example / "model"),
        "data": str(example / "data" / "train.jsonl"),
        "lengths": [258],
        "steps": 3,
    }
    losses = []
    for shards in (False, True):
        progress = tmp_path / f"{shards}.jsonl"
        run = {**given, "progress": str(progress), "recomputed": recomputed, "shards": shards}
        (tmp_path / "runs.json").write_text(json.dumps([run]))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [*launcher, "-m", "benchmarks.references.packed_loop", str(tmp_path / "runs.json")]
        subprocess.run(words, check=True, cwd=Path(__file__).parents[3], capture_output=True, timeout=300)
        losses.append([json.loads(line)["loss"] for line in progress.read_text().splitlines()])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
