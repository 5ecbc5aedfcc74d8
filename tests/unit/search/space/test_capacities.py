import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.dimensions.folds import layout_name
from autotune.dimensions.usual import layouts
from autotune.search.space.capacities import capacities, omnibal_capacities
from tests.values.data import index_of, lengths
from tests.values.search import workload_of
from trials.data.index import profile
from trials.plan import Layout
from trials.workload import DataProfile


def data_of(*rows: tuple[int, int]) -> DataProfile:
    """The profile of samples with these vision units and text tokens."""
    return profile(index_of(rows))


DATA = data_of(*[(5, 260)] * 60, *[(3, 170)] * 30, *[(1, 80)] * 10)
"""4 units and 215 tokens a sample."""
profiles = lengths.map(lambda rows: data_of(*rows))


def pairs(data: DataProfile, most_samples: float, *, hold_all: bool = False) -> list[tuple[int, int]]:
    return [(pair.qv, pair.qt) for pair in capacities(data, most_samples, hold_all=hold_all)]


def test_vision_capacities_are_sums_that_the_data_fills() -> None:
    """For packs of two samples of 5 units: not 9 or 11, which hold two samples as well and are never full."""
    fives = data_of(*[(5, 100)] * 60)
    images = {pair.qv: pair for pair in capacities(fives, 3, hold_all=False) if "images fill" in pair.reason}
    assert sorted(images) == [5, 10, 15]
    assert images[10].reason == "images fill 100% of packs, most often 5+5"


def test_the_text_capacity_for_full_images_holds_the_longest_of_their_packs() -> None:
    """A profile rounds lengths up to multiples of 64: twice 320."""
    data = data_of(*[(5, 100)] * 20, *[(5, 300)] * 20)
    full = [pair for pair in capacities(data, 2, hold_all=False) if pair.qv == 10 and "images fill" in pair.reason]
    assert [pair.qt for pair in full] == [640]


def test_capacities_by_text_follow_the_mean_sample() -> None:
    found = {pair.reason: (pair.qv, pair.qt) for pair in capacities(DATA, 3, hold_all=False)}
    assert found["text fills, 2 samples on average"] == (16, 432)
    assert found["text fills, 3 samples on average"] == (24, 656)


def test_omnibals_rule_is_among_the_capacities() -> None:
    rule = [pair for pair in capacities(DATA, 8, hold_all=False) if "OmniBal's rule" in pair.reason]
    assert [(pair.qv, pair.qt) for pair in rule] == [(5, 272)]


def test_capacities_grow_up_to_the_samples_of_a_step() -> None:
    most = [max(qt for _, qt in pairs(DATA, samples)) for samples in (2, 4, 4.5, 1000)]
    assert most[0] < most[1] == most[2] < most[3]
    assert len(pairs(DATA, 1)) <= 4


@given(profiles, st.integers(1, 64))
def test_where_a_long_sample_would_be_lost_every_capacity_holds_it(data: DataProfile, most: int) -> None:
    packings = omnibal_capacities(data, 4, hold_all=True)
    found = (*pairs(data, most, hold_all=True), *((packing.qv, packing.qt) for packing in packings))
    assert found
    assert all(qv >= data.most_vision_units and qt >= data.longest_text_tokens for qv, qt in found)


def test_capacities_that_are_raised_to_the_longest_sample_say_so_in_place_of_what_filled_smaller_ones() -> None:
    data = data_of(*[(5, 260)] * 60, (9, 900))
    own = {(pair.qv, pair.qt): pair.reason for pair in capacities(data, 3, hold_all=False)}
    held = {(pair.qv, pair.qt): pair.reason for pair in capacities(data, 3, hold_all=True)}
    raised = {pair for pair, reason in held.items() if reason == "raised to hold the longest sample"}
    assert raised
    assert all(own[pair] == held[pair] for pair in held.keys() - raised)


@given(profiles, st.integers(1, 64))
def test_every_capacity_is_one_that_a_packing_can_have(data: DataProfile, most: int) -> None:
    found = pairs(data, most)
    assert len(found) == len(set(found))
    assert all(qv >= 1 and qt >= 16 and qt % 16 == 0 for qv, qt in found)


@given(profiles)
def test_omnibals_capacities_lie_on_the_ray_of_the_mean_sample(data: DataProfile) -> None:
    units, tokens = data.vision_units / data.samples, data.text_tokens / data.samples
    for packing in omnibal_capacities(data, 4, hold_all=False):
        samples = packing.qv / units if units else 4
        assert 0 <= packing.qt - tokens * samples < 17
        assert (packing.qv_min, packing.qt_min) == (packing.qv, max(0, packing.qt - 128))


def test_omnibals_packs_hold_four_to_five_mean_samples() -> None:
    found = [(packing.qv, packing.qt) for packing in omnibal_capacities(DATA, 4, hold_all=False)]
    assert found == [(16, 864), (17, 928), (18, 976), (19, 1024), (20, 1088)]


def test_capacities_of_images_that_all_differ_are_near_what_packs_of_them_hold() -> None:
    chance = np.random.default_rng(0)
    units = np.where(chance.random(2000) < 0.8, chance.integers(4, 1280, 2000), 0)
    data = data_of(*zip(units.tolist(), (units + chance.integers(20, 200, 2000)).tolist(), strict=True))
    of_unit = data.text_tokens / data.vision_units
    assert all(qt < 8 * of_unit * qv for qv, qt in pairs(data, 16))


def test_text_without_images_has_capacities_too() -> None:
    data = data_of(*[(0, 200)] * 100)
    assert pairs(data, 2) == [(1, 208), (1, 304), (1, 400)]
    assert [(packing.qv, packing.qt) for packing in omnibal_capacities(data, 4, hold_all=False)] == [(1, 800)]


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layout_takes_all_devices_and_no_two_are_alike(devices: int, dtype: str) -> None:
    found = layouts(workload_of(dtype=dtype).model, devices)
    assert {layout.world_size for layout in found} == {devices}
    assert {layout.pipeline for layout in found} == {
        degree for degree in range(1, devices + 1) if devices % degree == 0
    }
    assert len({layout_name(layout) for layout in found}) == len(found)


def test_the_optimizer_is_split_only_over_data_parallel_ranks() -> None:
    names = [layout_name(layout) for layout in layouts(workload_of().model, 4)]
    assert names == ["p1-d4-z0", "p1-d4-z1", "p2-d2-z0", "p2-d2-z1", "p4-d1-z0"]


def test_bfloat16_needs_the_float32_copy_of_zero_1() -> None:
    assert layouts(workload_of(dtype="bfloat16").model, 2) == (
        Layout(pipeline=1, data=2, zero=1),
        Layout(pipeline=2, data=1, zero=1),
    )


def test_a_pipeline_has_no_more_stages_than_the_model_has_layers() -> None:
    assert max(layout.pipeline for layout in layouts(workload_of().model, 18)) == 9
