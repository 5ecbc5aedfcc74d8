import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.search.capacities import capacities, omnibal_capacities
from autotune.search.layouts import layout_name, layouts
from tests.search_values import data_profile, workload_of
from trials.plan import Layout
from trials.workload import DataProfile

DATA = data_profile(samples=100, vision_units=400, text_tokens=20_000, most_vision_units=13, longest_text_tokens=1500)
"""4 units and 200 tokens a sample."""
profiles = st.builds(
    data_profile,
    samples=st.just(100),
    vision_units=st.integers(0, 2000),
    text_tokens=st.integers(100, 100_000),
    most_vision_units=st.integers(0, 40),
    longest_text_tokens=st.integers(1, 5000),
)


def test_capacities_follow_the_mean_sample() -> None:
    assert capacities(DATA, 3, hold_all=False) == (
        (5, 304),
        (6, 304),
        (8, 304),
        (7, 400),
        (8, 400),
        (10, 400),
        (10, 608),
        (12, 608),
        (15, 608),
    )


def test_capacities_grow_up_to_the_samples_of_a_step() -> None:
    assert max(qt for _, qt in capacities(DATA, 6, hold_all=False)) == 1200
    assert max(qt for _, qt in capacities(DATA, 7.9, hold_all=False)) == 1200
    assert max(qt for _, qt in capacities(DATA, 1000, hold_all=False)) == 3200


def test_a_step_of_one_sample_has_capacities_for_one() -> None:
    assert capacities(DATA, 1, hold_all=False) == ((3, 208), (4, 208), (5, 208))


@given(profiles, st.integers(1, 64))
@settings(deadline=None)
def test_where_a_long_sample_would_be_lost_every_capacity_holds_it(data: DataProfile, most: int) -> None:
    packings = omnibal_capacities(data, 4, hold_all=True)
    pairs = (*capacities(data, most, hold_all=True), *((packing.qv, packing.qt) for packing in packings))
    assert pairs
    assert all(qv >= data.most_vision_units and qt >= data.longest_text_tokens for qv, qt in pairs)


@given(profiles)
@settings(deadline=None)
def test_omnibals_capacities_lie_on_the_ray_of_the_mean_sample(data: DataProfile) -> None:
    units, tokens = data.vision_units / data.samples, data.text_tokens / data.samples
    for packing in omnibal_capacities(data, 4, hold_all=False):
        samples = packing.qv / units if units else 4
        assert 0 <= packing.qt - tokens * samples < 17
        assert (packing.qv_min, packing.qt_min) == (packing.qv, max(0, packing.qt - 128))


def test_omnibals_packs_hold_four_to_five_mean_samples() -> None:
    found = [(packing.qv, packing.qt) for packing in omnibal_capacities(DATA, 4, hold_all=False)]
    assert found == [(16, 800), (17, 864), (18, 912), (19, 960), (20, 1008)]


def test_text_without_images_has_capacities_too() -> None:
    data = data_profile(samples=100, vision_units=0, text_tokens=20_000)
    assert capacities(data, 2, hold_all=False) == ((1, 304), (1, 400))
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
