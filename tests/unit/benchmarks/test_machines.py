import math
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from autotune.prediction.simulation.schedule import simulate
from autotune.prediction.updates import update_seconds_per_parameter
from benchmarks.cases.solver import INTERN_LM2_2B, INTERN_VIT_300M
from benchmarks.machines.analytic import A100, analytic_costs
from benchmarks.machines.dials import Dials, drawn_dials
from benchmarks.machines.jobs import DEVELOPMENT, HELD_OUT, MachineJob, machine_job
from benchmarks.machines.kernels import Kernels, drawn_device
from benchmarks.machines.layers import MatrixProduct, layer_works
from benchmarks.machines.links import Network, overlap
from benchmarks.machines.pipeline import Act, events, stage_ends
from tests.machines.simulated import Behaviour
from tests.machines.truths import PredictedTruth
from tests.values.parameters import parameters
from trials.costs.coefficients import LayerKind
from trials.costs.layer_costs import LayerCosts
from trials.grid import Grid
from trials.plan import Layout, Packed, Plan
from trials.run.pool import Answers
from trials.stage import Stage
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial

NO_DIALS = Dials()
OF_FORMS = ("decoding", "memory")
NAMES = [field.name for field in fields(Dials)]
PACKING = Packed(qv=9, qt=4096, qv_min=9, qt_min=4032, packer="best-fit")
WORKS = layer_works(INTERN_VIT_300M, INTERN_LM2_2B)
LARGE, SMALL = (200.0, 60_000.0, 60_000.0 * 2000, 60_000.0), (1.0, 300.0, 300.0**2, 300.0)
"""Units, tokens and squares of a pack."""


def job_of(seed: int = 0, **dials: float) -> MachineJob:
    """Return a job of 4 devices and a model of 12 + 12 layers."""
    vision, language = replace(INTERN_VIT_300M, layers=12), replace(INTERN_LM2_2B, layers=12)
    job = machine_job(seed, 0.0)
    return replace(
        job,
        vision=vision,
        language=language,
        devices=4,
        data="tiles up to 5",
        memory=1 << 40,
        dials=replace(NO_DIALS, **dials),
    )


def plan_of(*stages: tuple[int, int, int, int], packing: Packed = PACKING) -> Plan:
    """Return a plan on 4 devices of stages with (vision, language, recomputed vision, recomputed language) layers."""
    return Plan(
        packing=packing,
        layout=Layout(pipeline=len(stages), data=4 // len(stages), zero=1),
        stages=tuple(
            Stage(vision=v, language=t, recompute_vision=rv, recompute_language=rt) for v, t, rv, rt in stages
        ),
    )


ONE_STAGE = plan_of((12, 12, 3, 0))
TWO_STAGES = plan_of((12, 3, 0, 0), (0, 9, 0, 4))
FOUR_STAGES = plan_of((7, 0, 7, 0), (5, 1, 0, 1), (0, 6, 0, 0), (0, 5, 0, 0))
PLANS = (ONE_STAGE, TWO_STAGES, FOUR_STAGES)
SELECTIVE = replace(
    TWO_STAGES,
    stages=(
        Stage(vision=12, language=3, recompute_vision=2, selective_vision=4, selective_language=3),
        Stage(vision=0, language=9, selective_language=5),
    ),
)
SMALL_PACKS = replace(FOUR_STAGES, packing=replace(PACKING, qv=1, qt=250, qv_min=1, qt_min=200))


# --- the pipeline ---


@pytest.mark.parametrize(("hidden", "ends"), [(0.0, [11.0, 9.0]), (1.0, [11.0, 8.5])])
def test_a_small_schedule_takes_what_is_computed_by_hand(hidden: float, ends: list[float]) -> None:
    # Two micro-batches on two stages: 1 s forward, 2 s backward, 0.5 s each message. The first stage has both forward
    # passes behind it at 2.5 s and waits for the gradient, which arrives at 5 s.
    found = stage_ends(np.ones((1, 2, 2)), np.full((1, 2, 2), 2.0), np.full((1, 2, 1), 0.5), hidden)
    assert found.tolist() == [ends]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_every_stage_runs_each_pass_once_with_at_most_its_depth_in_flight(stages: int, count: int) -> None:
    of_passes = [event for event in events(stages, count) if event.act in (Act.FORWARD, Act.BACKWARD)]
    assert set(Counter(of_passes).values()) == {1}
    assert len(of_passes) == 2 * stages * count
    for stage in range(stages):
        steps = [1 if event.act is Act.FORWARD else -1 for event in of_passes if event.stage == stage]
        assert max(np.cumsum(steps)) == min(stages - stage, count)


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 1), (3, 7), (4, 2), (6, 11)])
def test_the_event_simulation_agrees_with_the_products_slots(stages: int, count: int) -> None:
    random = np.random.default_rng(stages)
    forward, backward = random.uniform(0.1, 2, (2, 20, count, stages))
    messages = random.uniform(0, 0.5, (20, count, stages - 1))
    ours = simulate(forward, backward, messages if stages > 1 else None).ends
    assert stage_ends(forward, backward, messages) == pytest.approx(ours, rel=1e-12)


# --- machines ---


@pytest.mark.parametrize(
    "plan", [*PLANS, SELECTIVE], ids=["one stage", "two stages", "four stages", "selective recomputation"]
)
def test_without_distortions_a_machine_takes_what_the_product_predicts_from_its_profile(plan: Plan) -> None:
    job = job_of()
    predicted = job.predictor.predict(plan)
    assert job.machine.step_seconds(plan) == pytest.approx(predicted.step_seconds, rel=1e-9)
    assert job.machine.step_samples(plan).tolist() == predicted.step_samples.tolist()
    assert job.machine.epoch_seconds(plan) == pytest.approx(predicted.epoch_seconds, rel=1e-9)


def test_selective_recomputation_takes_time_between_none_and_a_whole_layer() -> None:
    stages = SELECTIVE.stages
    none = replace(TWO_STAGES, stages=tuple(Stage(vision=each.vision, language=each.language) for each in stages))
    whole = tuple(
        Stage(
            vision=each.vision,
            language=each.language,
            recompute_vision=each.recompute_vision + each.selective_vision,
            recompute_language=each.selective_language,
        )
        for each in stages
    )
    job = job_of(launch=1.0, cache=1.0, fixed=1.0)
    plans = none, SELECTIVE, replace(TWO_STAGES, stages=whole)
    seconds = [job.machine.epoch_seconds(plan) for plan in plans]
    assert seconds == sorted(set(seconds))
    peaks = [max(job.machine.peaks(plan, (0, 1))) for plan in plans]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_profile_has_the_costs_of_selective_recomputation() -> None:
    job = job_of()
    shapes = analytic_costs(job.vision, job.language, A100)
    for kind in ("vision", "language"):
        assert job.costs[kind].selective_bytes == pytest.approx(shapes[kind].selective_bytes, rel=1e-6, abs=1)
        assert job.costs[kind].selective_peak_bytes == pytest.approx(shapes[kind].selective_peak_bytes, rel=1e-6, abs=1)
        assert 0 < sum(job.costs[kind].selective_seconds) < 0.2 * sum(job.costs[kind].recompute_seconds)


def test_the_same_seed_gives_the_same_machine() -> None:
    first, again, other = (machine_job(seed, 1.0) for seed in (3, 3, 4))
    assert first == again
    assert first.dials != other.dials
    seconds = [job_of(seed, structure=1.0, own=1.0).machine.epoch_seconds(TWO_STAGES) for seed in (3, 3, 4)]
    assert seconds[0] == seconds[1] != seconds[2]


def test_machines_for_tuning_are_other_ones_of_the_same_kinds_as_those_that_judge() -> None:
    assert not set(DEVELOPMENT) & set(HELD_OUT)
    for kind in ("vision", "data", "devices", "room"):
        tuned, judged = ({getattr(machine_job(seed, 1.0), kind) for seed in seeds} for seeds in (DEVELOPMENT, HELD_OUT))
        assert tuned == judged
        assert len(tuned) > 1


def test_dials_vary_around_their_level_up_to_2() -> None:
    assert drawn_dials(0.0, 7) == NO_DIALS
    for seed in range(20):
        dials = drawn_dials(1.8, seed)
        assert dials.profile == 1.8
        assert all(1.8 * 0.7 <= getattr(dials, name) <= 2 for name in NAMES if name not in OF_FORMS)
        assert not any(getattr(dials, name) for name in OF_FORMS)


@pytest.mark.parametrize("name", parameters({name: name for name in NAMES}, short=("efficiency", "memory", "profile")))
def test_each_dial_alone_moves_either_the_machine_or_its_profile(name: str) -> None:
    usual, turned = job_of(), job_of(0, **{name: 1.0})
    same = [usual.machine.epoch_seconds(plan) == turned.machine.epoch_seconds(plan) for plan in (*PLANS, SMALL_PACKS)]
    assert all(same) == (name in ("profile", "memory"))
    peaks = [[job.machine.peaks(plan, (0, 1)) for plan in PLANS] for job in (usual, turned)]
    assert (peaks[0] == peaks[1]) == (name != "memory")
    if name == "profile":
        assert usual.costs == turned.right_costs != turned.costs


@pytest.mark.parametrize(("seed", "is_buffered"), [(1, True), (3, False)])
def test_workers_hide_decoding_until_a_rank_has_too_many_packs(seed: int, is_buffered: bool) -> None:
    usual, stalled = job_of(seed), job_of(seed, decoding=3.0)
    decoding = stalled.machine.decoding
    assert decoding is not None
    assert decoding.workers > 0
    assert decoding.is_buffered is is_buffered
    longer = [stalled.machine.epoch_seconds(plan) / usual.machine.epoch_seconds(plan) for plan in PLANS]
    assert longer[0] < longer[2]  # one rank of four decodes
    waits = [job.machine.stage_seconds(FOUR_STAGES, range(6), 0)[0] for job in (usual, stalled)]
    assert waits[1] > waits[0]


def test_ranks_without_workers_decode_before_their_passes() -> None:
    usual, stalled = job_of(0), job_of(0, decoding=1.0)
    assert stalled.machine.decoding is not None
    assert stalled.machine.decoding.workers == 0
    more = stalled.machine.epoch_seconds(ONE_STAGE) - usual.machine.epoch_seconds(ONE_STAGE)
    # Where all ranks are as loaded it would be the time of one; the slowest decides.
    assert more > 0.8 * float(stalled.machine.decoding.samples.sum()) / 4


def layer_seconds(kind: LayerKind, size: tuple[float, float, float, float], dials: Dials) -> float:
    return float(Kernels(drawn_device(0), dials).layer(WORKS[kind], np.array([size])).forward[0])


def test_matrix_products_of_few_rows_lose_efficiency() -> None:
    def slower(size: tuple[float, float, float, float]) -> float:
        return layer_seconds("language", size, Dials(efficiency=1.0)) / layer_seconds("language", size, NO_DIALS)

    assert slower(SMALL) > 1.5
    assert 1 < slower(LARGE) < 1.1


def test_a_tile_more_than_a_whole_wave_costs_another_wave() -> None:
    device = replace(drawn_device(0), multiprocessors=32)
    work = replace(WORKS["head"], products=(MatrixProduct(inputs=1024, outputs=2048),), row_values=0, parameters=0)
    # 4 rows of 8 tiles fill the multiprocessors once.
    sizes = np.array([(0.0, 512.0, 0.0, 512.0), (0.0, 513.0, 0.0, 513.0)])
    below, above = Kernels(device, Dials(efficiency=1.0)).layer(work, sizes).forward
    assert above / below == pytest.approx(2, rel=0.01)


def test_small_packs_wait_for_the_host_and_large_ones_do_not() -> None:
    kernels = Kernels(drawn_device(0), Dials(launch=1.0))
    found = kernels.layer(WORKS["language"], np.array([(1.0, 16.0, 16.0**2, 16.0), LARGE]))
    assert (found.launch_forward > found.forward).tolist() == [True, False]


def test_values_that_fit_the_cache_move_faster() -> None:
    cached = Dials(cache=1.0)
    assert layer_seconds("vision", SMALL, cached) < 0.97 * layer_seconds("vision", SMALL, NO_DIALS)
    assert layer_seconds("vision", LARGE, cached) == pytest.approx(layer_seconds("vision", LARGE, NO_DIALS), rel=1e-3)


def test_messages_are_fast_inside_a_node_and_share_the_links_between_nodes() -> None:
    network, dials = Network(node_devices=4, latency_seconds=0.0, seconds_per_byte=1.0), Dials(communication=1.0)
    inside = network.message_factor(Grid(pipeline=4, data=1), dials, 0)
    alone = network.message_factor(Grid(pipeline=8, data=1), dials, 3)
    shared = network.message_factor(Grid(pipeline=2, data=4), dials, 0)
    assert inside < alone == 1 < shared
    assert network.message_factor(Grid(pipeline=2, data=4), NO_DIALS, 0) == 1
    assert 0 == overlap(NO_DIALS) < overlap(dials) < 1


def test_each_pass_and_each_step_has_a_fixed_cost() -> None:
    usual, fixed = job_of().machine, job_of(fixed=1.0).machine
    one_more = fixed.step_seconds(ONE_STAGE) - usual.step_seconds(ONE_STAGE)
    packs = usual.stage_seconds(ONE_STAGE, (0,), 0)
    assert (one_more > 15e-3).all()
    more = np.subtract(fixed.stage_seconds(ONE_STAGE, (0,), 0), packs)
    assert more[1] > 1e-3
    assert more[2] > more[1]  # recomputed layers cost the host time as well
    assert more[0] == more[3] == 0


def test_plans_of_equal_layout_capacities_and_split_share_the_structured_error() -> None:
    structure = job_of(structure=1.0).machine.structure
    recomputing = replace(TWO_STAGES, stages=(replace(TWO_STAGES.stages[0], recompute_vision=5), TWO_STAGES.stages[1]))
    slightly = replace(TWO_STAGES, packing=replace(PACKING, qt=4097))
    others = [
        FOUR_STAGES,
        replace(TWO_STAGES, packing=replace(PACKING, qt=12_000)),
        replace(TWO_STAGES, packing=replace(PACKING, packer="isf")),
        plan_of((4, 0, 0, 0), (8, 12, 0, 0)),
    ]
    own = structure.factor(TWO_STAGES)
    assert structure.factor(recomputing) == own
    assert structure.factor(slightly) == pytest.approx(own, abs=1e-4)
    assert min(abs(structure.factor(plan) - own) for plan in others) > 1e-4


def test_plans_differ_by_an_error_of_their_own() -> None:
    structure = job_of(own=1.0).machine.structure
    errors = [
        structure.factor(replace(TWO_STAGES, packing=replace(PACKING, qt=4096 + more))) - 1 for more in range(200)
    ]
    assert 0.0015 < np.std(errors) < 0.0025


def test_the_profile_is_wrong_by_a_factor_on_each_cost() -> None:
    job = job_of(profile=1.0)

    def ratio(cost_of: Callable[[LayerCosts], float]) -> float:
        return cost_of(job.costs) / cost_of(job.right_costs)

    ratios = [
        ratio(lambda costs: costs["vision"].forward_seconds[0]),
        ratio(lambda costs: costs["language"].backward_seconds[1]),
        ratio(lambda costs: costs["head"].forward_seconds[1]),
        ratio(lambda costs: costs["language"].recompute_seconds[1]),
        ratio(lambda costs: costs.link.seconds_per_byte),
        ratio(lambda costs: update_seconds_per_parameter(costs, TWO_STAGES.layout)),
    ]
    assert np.abs(np.log(ratios)) == pytest.approx(math.log(1.3))
    assert job.costs["vision"].kept_bytes == job.right_costs["vision"].kept_bytes


def test_a_launcher_answers_with_the_times_and_peaks_of_the_machine() -> None:
    job = job_of()
    request = job.prepared(trials=1).request(TWO_STAGES, Trial(warmup_steps=(0,), timed_steps=(1, 3)))
    answers = job.launcher(Behaviour(noise=0.0), 0).ask(request, 60.0)
    assert isinstance(answers, Answers)
    of_ranks = [report for report in answers.reports if isinstance(report, TrialReport)]
    assert [(report.stage.stage, report.stage.data_rank) for report in of_ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank, report in enumerate(of_ranks):
        assert report.step_seconds == pytest.approx(job.machine.step_seconds(TWO_STAGES)[[1, 3]])
        stage = report.stage
        measured = stage.load_seconds, stage.forward_seconds, stage.backward_seconds, stage.optimizer_seconds
        assert measured == pytest.approx(PredictedTruth(job.predictor).stage_seconds(TWO_STAGES, (1, 3), rank))
        assert stage.peak_bytes == job.machine.peaks(TWO_STAGES, (0, 1, 3))[stage.stage]
