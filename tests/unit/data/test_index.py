from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.values.data import file_of, index_of, lengths, record, write_records
from trials.data.index import COLUMNS, DatasetIndex, median_text_tokens, profile
from trials.data.order import epoch_order
from trials.errors import DataError


@given(lengths, st.lists(st.sampled_from([0.25, 1.0, 2.5]), min_size=1, max_size=3))
def test_a_saved_index_is_loaded_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]], repeats: list[float]
) -> None:
    index = index_of(rows, repeats)
    path = tmp_path_factory.mktemp("index") / "lengths.npz"
    index.save(path)
    loaded = DatasetIndex.load(path)
    assert loaded.files == index.files
    assert loaded.digest == index.digest
    for name, kind in COLUMNS.items():
        assert getattr(loaded, name).dtype == kind
        assert getattr(loaded, name).tolist() == getattr(index, name).tolist()
    assert [child.name for child in path.parent.iterdir()] == ["lengths.npz"]


def test_processes_that_save_one_index_at_the_same_time_leave_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npz"
    index = index_of([(1, 2)] * 1000)
    with ThreadPoolExecutor(4) as savers:
        for _ in savers.map(lambda _: index.save(path), range(64)):
            assert len(DatasetIndex.load(path)) == 1000
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_digest_changes_with_the_position_of_a_sample() -> None:
    index = index_of([(1, 2), (3, 4)])
    moved = replace(index, offset=index.offset + 1)
    assert moved.digest == index.digest
    assert moved.content_digest != index.content_digest
    assert replace(index, files=(replace(index.files[0], path=Path("/other")),)).content_digest != index.content_digest


@pytest.mark.parametrize("damage", [b"", b"not an index", None])
def test_a_damaged_index_is_refused_with_the_remedy(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "lengths.npz"
    index_of([(1, 2)]).save(path)
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    with pytest.raises(DataError, match=r"lengths\.npz cannot be read .*; index the dataset again"):
        DatasetIndex.load(path)


def test_an_index_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npz"
    index_of([(1, 2)]).save(path)
    with np.load(path) as stored:
        changed = {**stored, "layout": np.array(99)}
    np.savez(path, **changed)
    with pytest.raises(DataError, match="has layout 99, not 4"):
        DatasetIndex.load(path)


def test_the_digest_changes_with_every_length_and_repeat() -> None:
    indexes = [
        index_of([(1, 10), (2, 20)]),
        index_of([(2, 20), (1, 10)]),
        index_of([(1, 10), (2, 21)]),
        index_of([(1, 10), (2, 22)]),
        index_of([(1, 10), (2, 20)], repeats=(2.0,)),
    ]
    assert len({index.digest for index in indexes}) == 5
    assert len({index.steps_digest for index in indexes}) == 5


def test_the_digest_of_steps_changes_with_the_file_of_a_sample() -> None:
    one, two = (index_of([(1, 10), (2, 20)], repeats) for repeats in ((1.0,), (1.0, 1.0)))
    assert one.digest == two.digest
    assert one.steps_digest != two.steps_digest
    elsewhere = replace(one, files=(replace(one.files[0], path=Path("/moved/there.jsonl")),))
    assert one.steps_digest == elsewhere.steps_digest


def test_the_profile_counts_what_an_epoch_shows() -> None:
    index = index_of([(0, 10), (1, 64), (1, 65), (3, 200)], repeats=(2.0, 0.5))
    found = profile(index)
    assert (found.samples, found.text_only_samples, found.vision_units, found.text_tokens) == (5, 2, 4, 280)
    assert (found.longest_text_tokens, found.most_vision_units) == (200, 3)
    assert found.lengths_digest == index.digest


@given(lengths, st.sampled_from([0.001, 0.3, 1.0, 1.4, 2.0]))
def test_the_histogram_and_an_epoch_have_as_many_samples(rows: list[tuple[int, int]], repeat: float) -> None:
    index = index_of(rows, repeats=(repeat,))
    found = profile(index)
    assert sum(count for *_, count in found.histogram) == found.samples == len(epoch_order(index, 0, 0)) > 0


@given(lengths, st.sampled_from([1.0, 2.0, 3.0]))
def test_the_histogram_holds_every_shown_sample(rows: list[tuple[int, int]], repeat: float) -> None:
    index = index_of(rows, repeats=(repeat,))
    found = profile(index)
    assert sum(count for *_, count in found.histogram) == found.samples == len(epoch_order(index, 0, 0))
    assert list(found.histogram) == sorted(found.histogram)
    assert {(units, -(-tokens // 64) * 64) for units, tokens in rows} == {(u, t) for u, t, _ in found.histogram}


@given(rows=lengths, repeat=st.sampled_from((0.25, 1.0, 3.0)))
@example(rows=[(0, tokens) for tokens in (1,) * 5 + (2,) * 4 + (1,) * 3 + (2,) * 6], repeat=0.25)
def test_half_of_the_shown_samples_have_at_most_the_median(rows: list[tuple[int, int]], repeat: float) -> None:
    index = index_of(rows, repeats=(1.0, repeat))
    median, shown = median_text_tokens(index), index.repeats.sum()
    assert index.repeats[index.text_tokens <= median].sum() >= shown / 2 * (1 - 1e-9)
    assert index.repeats[index.text_tokens < median].sum() < shown / 2
    assert median_text_tokens(index_of([(0, 5), (1, 136), (2, 137), (3, 809)])) == 136


def test_a_record_that_is_gone_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", record("a", "b"))
    index = replace(index_of([(0, 10)]), files=(file_of(path),))
    assert index.sample(0).turns[1].text == "b"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.jsonl:1: the record is not JSON: .*; the file has changed"):
        index.sample(0)
