"""The plain packed loop takes the samples that autotune takes, and packs each once."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.references.loop_data import Data
from benchmarks.references.packs_by_hand import first_fit_decreasing
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
