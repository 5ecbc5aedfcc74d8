"""Each part of a step's time on a suitable case, and all of them on random ones."""

from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from autotune.prediction.simulation.attribution import (
    Breakdown,
    PackSeconds,
    Slowness,
    UpdateSeconds,
    attribute,
    whole_seconds,
)
from autotune.prediction.simulation.schedule import simulate
from autotune.prediction.simulation.synchronization import Sharing
from autotune.prediction.simulation.zero_bubble import DeferredWeights
from tests.values.parameters import examples
from trials.arrays import Floats, Ints

NOTHING = dict.fromkeys([field.name for field in fields(Breakdown)], 0.0)


def pack_seconds(forward: Floats, sends: float = 0.0) -> PackSeconds:
    """Backward passes take as long as forward passes; nothing is padded or recomputed. `forward` [packs, stages]."""
    return PackSeconds(
        load=np.zeros_like(forward),
        forward=forward,
        backward=forward,
        recompute=np.zeros_like(forward),
        weights=np.zeros_like(forward),
        most_deferred=np.arange(forward.shape[1]),
        samples=2 * forward,
        equal_parts=2 * forward,
        sends=np.full((len(forward), forward.shape[1] - 1), sends),
        returns=np.full((len(forward), forward.shape[1] - 1), sends),
        exchange=np.zeros_like(forward),
        exchange_back=np.zeros_like(forward),
    )


def update(stages: int, reduction: float = 0.0, optimizer: float = 0.0) -> UpdateSeconds:
    return UpdateSeconds(
        reduction=np.full(stages, reduction), optimizer=np.full(stages, optimizer), together=np.full(stages, False)
    )


def parts(packs: list[list[int]], seconds: PackSeconds, after: UpdateSeconds | None = None) -> dict[str, float]:
    """Return the parts of the time of one step of packs [micro-batches, data ranks]."""
    breakdown, _ = attribute(np.array([packs]), seconds, after or update(seconds.forward.shape[1]))
    return breakdown.totals


def test_equal_work_everywhere_is_ideal() -> None:
    one_stage = pack_seconds(np.full((4, 1), 3.0))
    assert parts([[0, 1], [2, 3]], one_stage) == {**NOTHING, "ideal": 2 * 6.0}


def test_what_samples_do_not_need_is_padding() -> None:
    seconds = pack_seconds(np.full((2, 1), 3.0))
    padded = PackSeconds(**{**_fields(seconds), "samples": np.array([[4.0], [6.0]])})
    assert parts([[0], [1]], padded) == {**NOTHING, "ideal": 10.0, "padding": 2.0}


def test_unequal_parts_of_a_shared_pack_are_data_imbalance() -> None:
    seconds = pack_seconds(np.full((2, 1), 3.0))
    unequal = PackSeconds(**{**_fields(seconds), "samples": np.full((2, 1), 4.0), "equal_parts": np.full((2, 1), 4.5)})
    assert parts([[0], [1]], unequal) == {**NOTHING, "ideal": 8.0, "padding": 1.0, "data_imbalance": 3.0}


def test_passes_that_are_run_again_are_recompute() -> None:
    seconds = pack_seconds(np.full((2, 1), 3.0))
    again = np.full((2, 1), 2.0)
    recomputing = PackSeconds(**{**_fields(seconds), "backward": seconds.backward + again, "recompute": again})
    assert parts([[0], [1]], recomputing) == {**NOTHING, "ideal": 12.0, "recompute": 4.0}


def test_waiting_for_data_is_loading() -> None:
    seconds = pack_seconds(np.full((2, 2), 3.0))
    loading = PackSeconds(**{**_fields(seconds), "load": np.full((2, 2), 0.5)})
    # The last stage loads labels only when the states are there, a second wait on the way through the pipeline.
    assert parts([[0, 1]], loading)["loading"] == 1.0
    first_alone = PackSeconds(**{**_fields(seconds), "load": np.array([[0.5, 0.0], [0.5, 0.0]])})
    found = parts([[0, 1]], first_alone)
    assert (found["loading"], found["stage_imbalance"]) == (0.5, 0.0)


def test_ranks_that_wait_for_a_slower_rank_are_data_imbalance() -> None:
    seconds = pack_seconds(np.array([[1.0], [3.0]]))
    assert parts([[0, 1]], seconds) == {**NOTHING, "ideal": 4.0, "data_imbalance": 2.0}


def test_a_stage_with_more_layers_is_stage_imbalance_and_the_way_through_the_pipeline_is_bubble() -> None:
    packs = [[0]] * 6
    slow_last = pack_seconds(np.array([[1.0, 3.0]]))
    assert parts(packs, slow_last) == {**NOTHING, "ideal": 6 * 4.0, "stage_imbalance": 6 * 2.0, "bubble": 2.0}
    equal = pack_seconds(np.array([[2.0, 2.0, 2.0]]))
    assert parts(packs, equal) == {**NOTHING, "ideal": 6 * 4.0, "bubble": 2 * 4.0}


def test_waiting_for_uneven_packs_is_data_imbalance_where_the_stages_sums_are_equal() -> None:
    uneven = pack_seconds(np.array([[1.0, 3.0], [3.0, 1.0]]))
    assert parts([[0], [1], [1], [0]], uneven) == {**NOTHING, "ideal": 16.0, "data_imbalance": 2.0, "bubble": 4.0}
    equal = parts([[0]] * 4, pack_seconds(np.array([[2.0, 2.0]])))
    assert equal == {**NOTHING, "ideal": 16.0, "bubble": 4.0}


def test_packs_in_a_good_order_shorten_the_bubble() -> None:
    """The first and the last pack pass the pipeline alone: small ones there make the others wait less."""
    packs = pack_seconds(np.array([[2.0, 2.0], [4.0, 4.0], [3.0, 3.0]]))
    assert parts([[0], [1], [1], [0]], packs) == {**NOTHING, "ideal": 24.0, "bubble": 4.0}
    assert parts([[2]] * 4, packs) == {**NOTHING, "ideal": 24.0, "bubble": 6.0}


def test_a_slow_rank_is_measured_as_imbalance() -> None:
    seconds = pack_seconds(np.full((2, 1), 3.0))
    slow = Slowness(work=np.array([[1.0], [2.0]]), load=np.ones((2, 1)), wait=np.array([[0.5], [0.5]]))
    breakdown, work = attribute(np.array([[[0, 1]]]), seconds, update(1), slow)
    assert breakdown.totals == {**NOTHING, "ideal": 9.0, "loading": 0.5, "data_imbalance": 3.0}
    assert work.tolist() == [[19.0]]


def test_sends_and_reductions_are_communication_and_the_update_is_optimizer() -> None:
    one_pack = pack_seconds(np.array([[2.0, 2.0]]), sends=0.5)
    assert parts([[0, 0]], one_pack, update(2, reduction=1.0, optimizer=0.25)) == {
        **NOTHING,
        "ideal": 4.0,
        "bubble": 4.0,
        "communication": 2 * 0.5 + 1.0,
        "optimizer": 0.25,
    }


def test_a_stage_updates_while_earlier_stages_still_run() -> None:
    late_first = pack_seconds(np.array([[1.0, 1.0]]))
    after = replace(update(2), optimizer=np.array([0.5, 1.0]))
    # Stage 1 ends a second before stage 0, so its longer update is over half a second before the other.
    assert parts([[0]], late_first, after)["optimizer"] == 0.5
    # With a tied weight it waits for stage 0.
    tied = replace(after, together=np.array([True, True]))
    assert parts([[0]], late_first, tied)["optimizer"] == 1.0
    assert whole_seconds(np.array([[[0]]]), late_first, tied, None) == 4.0 + 1.0


cases = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
"""(steps, micro-batches, data ranks, stages)"""


@st.composite
def attributed(draw: st.DrawFn) -> tuple[Ints, PackSeconds, UpdateSeconds]:
    steps, count, ranks, stages = draw(cases)
    packs = np.arange(steps * count * ranks).reshape(steps, count, ranks)

    def seconds(*shape: int) -> Floats:
        return draw(arrays(np.float64, shape, elements=st.floats(0.0, 10)))

    load, forward, backward, again = (seconds(packs.size, stages) for _ in range(4))
    low, high = sorted(draw(st.floats(0.1, 1)) for _ in range(2))
    return (
        packs,
        PackSeconds(
            load=load,
            forward=forward,
            backward=backward + again,
            recompute=again,
            weights=backward * (draw(st.floats(0, 1)) if stages > 1 else 0),
            most_deferred=np.arange(stages),
            samples=low * (forward + backward),
            equal_parts=high * (forward + backward),
            sends=seconds(packs.size, stages - 1),
            returns=seconds(packs.size, stages - 1),
            exchange=seconds(packs.size, stages),
            exchange_back=seconds(packs.size, stages),
        ),
        UpdateSeconds(reduction=seconds(stages), optimizer=seconds(stages), together=draw(arrays(np.bool_, stages))),
    )


@st.composite
def shared_rows(draw: st.DrawFn) -> tuple[Ints, Ints]:
    """Packs [1, micro-batches, data ranks] in rows of one degree each, and the degree of each pack."""
    rows, degrees, packs = [], list[int](), 0
    for degree in draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5)):
        rows.append(np.repeat(np.arange(packs, packs + 4 // degree), degree))
        degrees += [degree] * (4 // degree)
        packs = len(degrees)
    return np.array(rows)[None], np.array(degrees)


@given(shared_rows(), st.randoms(use_true_random=False))
def test_ranks_that_share_a_pack_begin_it_together(case: tuple[Ints, Ints], random: Random) -> None:
    packs, degrees = case
    seconds = np.array([[random.uniform(0.1, 3)] for _ in degrees])
    clock = [0.0] * 4
    for of_row in packs[0]:
        begins = [max(clock[other] for other in range(4) if of_row[other] == of_row[rank]) for rank in range(4)]
        clock = [begin + seconds[pack, 0] for begin, pack in zip(begins, of_row, strict=True)]
    whole = pack_seconds(seconds / 2)
    always = np.array([True])
    sharing = Sharing(degrees=degrees, forward=always, backward=always)
    breakdown, work = attribute(packs, whole, update(1), waiting=sharing)
    assert breakdown.seconds[0] == pytest.approx(max(clock))
    assert work[0, 0] == pytest.approx(seconds[packs].sum())
    assert all(seconds >= -1e-9 for seconds in breakdown.totals.values())


@given(attributed())
@settings(max_examples=examples(80))
def test_the_parts_are_not_negative_and_sum_to_the_simulated_step(
    case: tuple[Ints, PackSeconds, UpdateSeconds],
) -> None:
    packs, seconds, after = case
    breakdown, work = attribute(packs, seconds, after)
    for field in fields(breakdown):
        assert (getattr(breakdown, field.name) >= -1e-9).all(), field.name
    for number, step in enumerate(packs):
        ends = [
            simulate(
                *(
                    side[rank][None]
                    for side in (seconds.shared_forward, seconds.shared_backward, seconds.sends, seconds.returns)
                ),
                weights=DeferredWeights(seconds.weights[rank][None], seconds.most_deferred),
            ).ends[0]
            for rank in step.T
        ]
        begins = np.max(ends, axis=0)
        begins[after.together] = begins[after.together].max(initial=0)
        whole = (begins + after.reduction + after.optimizer).max()
        assert breakdown.seconds[number] == pytest.approx(whole)
        passes = seconds.shared_forward + seconds.shared_backward
        assert work[number] == pytest.approx(passes[step].sum(axis=(0, 1)))


def test_steps_of_two_lengths_are_joined_in_order() -> None:
    seconds = pack_seconds(np.array([[1.0], [2.0], [4.0]]))
    first, _ = attribute(np.array([[[0], [1]]]), seconds, update(1))
    last, _ = attribute(np.array([[[2]]]), seconds, update(1))
    joined = Breakdown.joined([first, last])
    assert joined.seconds.tolist() == [6.0, 8.0]
    assert joined.totals == {**NOTHING, "ideal": 14.0}


def _fields(seconds: PackSeconds) -> dict[str, Floats]:
    return {field.name: getattr(seconds, field.name) for field in fields(seconds)}
