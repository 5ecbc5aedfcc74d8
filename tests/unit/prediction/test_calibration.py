"""Factors and their errors, from observations drawn with known factors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.prediction.calibration import Calibration, Observation, Peak
from autotune.prediction.features import COSTS, FEATURES, scaled, stage_features, step_features
from autotune.prediction.features import LAYER_COSTS as OF_LAYERS
from autotune.prediction.memory import StageBytes
from autotune.prediction.predictor import Predictor
from autotune.prediction.updates import update_seconds_per_parameter
from autotune.search.learning.calibrated import CalibratedPredictor, peaks
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.values.exchanges import copies, exchanging
from tests.values.parameters import examples
from tests.values.search import COSTS as LAYER_COSTS
from tests.values.search import MEBI, deferring, finished, keeping, predictor_of, prepared_of, runner_of
from tests.values.training import offloading, plan_of
from trials.arrays import Floats
from trials.costs.coefficients import times
from trials.costs.layer_costs import UpdateCost
from trials.outcome import Completed, Crash, Failed, Measurement, OutOfMemory, Rejected
from trials.plan import Layout, Packed, Padded, Plan, ZeroStage

PREDICTOR = predictor_of()
PACKED = Packed(qv=12, qt=600, qv_min=12, qt_min=500)
PLANS = (
    plan_of("4+0", "1+4", packing=PACKED),
    plan_of("5+0r3,0", "0+4r0,2", packing=PACKED),
    plan_of("5+4r2,0", data=2, packing=PACKED),
    plan_of("3+0", "2+4r2,4", packing=Padded(samples=2)),
    plan_of("5+1", "0+3", packing=PACKED),
    plan_of("5+4r5,4", data=2, zero=1, packing=PACKED),
)
TRUTH = (1.3, 0.8, 1.1, 1.2, 1.5, 1.4, 1.0, 0.9, 0.05)


def drawn(count: int, noise: float = 0.01, truth: tuple[float, ...] = TRUTH, seed: int = 0) -> list[Observation]:
    """Return steps of random parts with the times of these true factors."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        parts = random.uniform(0.05, 1, len(COSTS))
        features = (*parts.tolist(), float(parts.sum()))
        found.append(Observation(features=features, seconds=float(np.dot(features, truth)) * random.normal(1, noise)))
    return found


def errors(calibration: Calibration, count: int = 50) -> list[float]:
    """Return relative errors on other steps."""
    return [abs(calibration.seconds(o.features)[0] / o.seconds - 1) for o in drawn(count, noise=0.0, seed=99)]


def stage_bytes(static: float, kept: float) -> StageBytes:
    total = static + kept
    return StageBytes(static=static, low=static + 0.99 * kept, expected=total, high=static + 1.01 * kept)


def measured(plan: Plan, folder: Path, predictor: Predictor) -> Measurement:
    """Return a measurement on ranks whose true times are those of `predictor`."""
    run = runner_of(folder, SimulatedLauncher(predictor), predictor=PREDICTOR, timed_steps=2).run(plan)
    assert isinstance(run.outcome, Completed)
    return run.outcome.measurement


def corrections(predictor: Predictor, plans: list[Plan], folder: Path) -> Floats:
    """Return the factors of layers that trials teach on a machine as this predictor says."""
    calibrated = CalibratedPredictor(predictor)
    for number, plan in enumerate(plans):
        machine = SimulatedLauncher(predictor, Behaviour(noise=0.0))
        outcome = runner_of(folder / str(number), machine, predictor=predictor).run(plan).outcome
        assert isinstance(outcome, Completed)
        calibrated.observe(plan, outcome.measurement, warmup_steps=1)
    return calibrated.factors[: len(OF_LAYERS)]


# --- time ---


def test_without_observations_the_profile_is_believed_within_the_prior() -> None:
    calibration = Calibration.fit()
    features = drawn(1)[0].features
    mean, error = calibration.seconds(features)
    assert mean == pytest.approx(sum(features[:-1]))
    assert 0.20 < error / mean < 0.40
    assert calibration.factors == (1.0,) * len(COSTS)
    assert calibration.schedule_factor == 1.0


def test_ten_trials_bring_the_error_near_that_of_one_measurement() -> None:
    assert np.median(errors(Calibration.fit())) > 0.05
    assert np.median(errors(Calibration.fit(drawn(10)))) < 0.03
    assert np.median(errors(Calibration.fit(drawn(60)))) < 0.005


@pytest.mark.parametrize("factor", [0.2, 10.0])
def test_one_disturbed_trial_counts_little(factor: float) -> None:
    clean = drawn(12)
    dirty = [replace(clean[0], seconds=clean[0].seconds * factor), *clean[1:]]
    assert np.median(errors(Calibration.fit(dirty))) < 0.04


def test_errors_are_wider_away_from_what_was_measured() -> None:
    def parts(vision: float, language: float) -> tuple[float, ...]:
        found = {"vision": vision, "language": language, "schedule": vision + language}
        return tuple(found.get(name, 0.0) for name in FEATURES)

    alike = [Observation(features=parts(1, 0), seconds=1.1 + 0.002 * n) for n in range(10)]
    calibration = Calibration.fit(alike)

    def error(vision: float, language: float) -> float:
        mean, width = calibration.seconds(parts(vision, language))
        return width / mean

    near, between, far = error(2, 0), error(1, 1), error(0, 1)
    assert near < 0.04
    assert 1.5 * near < between < far


@given(st.integers(1, 30), st.integers(0, 5))
@settings(max_examples=examples(20))
def test_measurements_never_widen_the_prior(count: int, seed: int) -> None:
    features = drawn(1, seed=7)[0].features
    before = Calibration.fit().seconds(features)[1]
    assert Calibration.fit(drawn(count, seed=seed)).seconds(features)[1] < before


def test_most_measurements_lie_within_two_standard_errors() -> None:
    calibration = Calibration.fit(drawn(20, noise=0.02))
    held_out = drawn(200, noise=0.02, seed=5)
    within = [abs(o.seconds - mean) < 2 * error for o in held_out for mean, error in [calibration.seconds(o.features)]]
    assert np.mean(within) > 0.9


def test_no_factor_is_negative() -> None:
    calibration = Calibration.fit(drawn(40, truth=(1.0, 1.0, 1.0, 0.0, 0.0, 1.0, -3.0, 0.0, 0.0)))
    assert min(calibration.factors) >= 0


# --- bytes ---


def test_without_peaks_memory_is_known_within_a_tenth() -> None:
    found = Calibration.fit().bytes(stage_bytes(50 * MEBI, 100 * MEBI))
    assert found.expected == pytest.approx(150 * MEBI)
    assert 0.88 < found.low / found.expected < 0.95
    assert 1.05 < found.high / found.expected < 1.12


def test_measured_peaks_correct_the_bytes_and_narrow_their_interval() -> None:
    random = np.random.default_rng(0)
    stages = [stage_bytes(*(random.uniform(20, 100, 2) * MEBI).tolist()) for _ in range(10)]
    found = [Peak(predicted=s, measured=s.static + 1.06 * (s.expected - s.static)) for s in stages]
    wrong = replace(found[0], measured=3 * found[0].measured)
    stage = stage_bytes(40 * MEBI, 80 * MEBI)
    for seen in (found, [wrong, *found[1:]]):
        corrected = Calibration.fit((), seen).bytes(stage)
        assert corrected.expected == pytest.approx((40 + 1.06 * 80) * MEBI, rel=0.01)
        assert corrected.low < corrected.expected < corrected.high
        assert corrected.high - corrected.low < 0.08 * corrected.expected


@pytest.mark.parametrize("spread", [0.03, 0.08])
def test_the_error_of_bytes_that_no_factor_explains_is_learnt(spread: float) -> None:
    random, learnt = np.random.default_rng(0), []
    for _ in range(20):
        stages = [stage_bytes(*(random.uniform(20, 100, 2) * MEBI).tolist()) for _ in range(30)]
        factors = np.exp(spread * random.standard_normal(len(stages)))
        found = [Peak(predicted=s, measured=s.expected * factor) for s, factor in zip(stages, factors, strict=True)]
        learnt.append(Calibration.fit((), found).byte_noise)
    assert np.mean(learnt) == pytest.approx(spread, rel=0.15)


def kept_more(factor: float, static: float = 40.0, kept: float = 80.0) -> Peak:
    """A stage that keeps `factor` times the predicted bytes."""
    return Peak(predicted=stage_bytes(static * MEBI, kept * MEBI), measured=(static + factor * kept) * MEBI)


def test_a_stage_that_ran_out_of_memory_counts_where_it_needed_more_than_expected() -> None:
    stage = stage_bytes(40 * MEBI, 80 * MEBI)
    alone = Calibration.fit().bytes(stage)
    exceeded = [kept_more(factor, static, 2 * static) for factor, static in ((1.02, 30), (1.10, 50), (1.06, 40))]
    learnt = Calibration.fit((), (), exceeded).bytes(stage)
    assert learnt.expected == pytest.approx((40 + 1.10 * 80) * MEBI, rel=0.015)
    assert learnt.high - learnt.low < (alone.high - alone.low) / 2
    assert Calibration.fit((), (), [kept_more(0.97)] * 5).bytes(stage) == alone


def test_a_stage_that_ran_out_of_memory_never_lowers_what_peaks_show() -> None:
    stage = stage_bytes(40 * MEBI, 80 * MEBI)
    shown = [kept_more(1.10, static) for static in (20, 40, 60)]
    assert Calibration.fit((), shown, [kept_more(1.05)] * 5).bytes(stage) == Calibration.fit((), shown).bytes(stage)


# --- predictions of plans ---


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_the_parts_of_a_step_add_up_to_it_at_any_factors(plan: Plan) -> None:
    for factors in ((1.0,) * len(COSTS), TRUTH[:-1]):
        predicted = predictor_of(scaled(LAYER_COSTS, factors)).step_seconds(plan, (0, 3)).mean()
        features = step_features(PREDICTOR, plan, (0, 3), factors)
        assert np.dot(features[:-1], factors) == pytest.approx(predicted)
        assert features[-1] == pytest.approx(predicted)
        assert min(features) >= 0


def test_the_parts_of_the_stages_are_their_passes_and_update() -> None:
    plan = PLANS[1]
    load, forward, backward, update = stage_features(PREDICTOR, plan, (2,), (1.0,) * len(COSTS), stage=0, data_rank=0)
    assert [name for name, value in zip(FEATURES, load, strict=True) if value] == ["loading"]
    parts = dict(zip(FEATURES, forward, strict=True))
    assert parts["vision"] > 0 < parts["pack"]
    assert parts["language"] == parts["recompute"] == parts["loading"] == parts["update"] == parts["schedule"] == 0
    assert dict(zip(FEATURES, backward, strict=True))["recompute"] > 0
    assert [name for name, value in zip(FEATURES, update, strict=True) if value] == ["update"]


@pytest.mark.parametrize("copied", [2e-9, 4e-9], ids=["mostly hidden", "mostly waited for"])
def test_a_machine_as_predicted_corrects_nothing_where_layers_offload(copied: float, tmp_path: Path) -> None:
    predictor = predictor_of(exchanging(LAYER_COSTS, copies(copied, copied)))
    plans = [plan_of("5+0r5,0", "0+4r0,4", packing=PACKED), plan_of("4+0r4,0", "1+4r1,4", packing=PACKED)]
    assert corrections(predictor, [offloading(plan, "both") for plan in plans], tmp_path) == pytest.approx(1)


def test_a_machine_as_predicted_corrects_nothing_where_stages_defer_weight_gradients(tmp_path: Path) -> None:
    costs = deferring(LAYER_COSTS)
    slower = ((kind, replace(cost, deferral_seconds=times(cost.backward_seconds, 0.1))) for kind, cost in costs.layers)
    plan = plan_of("4+0", "1+4", packing=PACKED)
    plan = replace(plan, layout=replace(plan.layout, zero_bubble=True))
    assert corrections(predictor_of(replace(costs, layers=tuple(slower))), [plan], tmp_path) == pytest.approx(1)


def test_what_the_update_of_zero_1_takes_beyond_its_share_of_the_optimizer_is_communication() -> None:
    alone = LAYER_COSTS.updates[0].seconds_per_parameter
    gathering = UpdateCost(zero=1, data_parallel=2, seconds_per_parameter=10 * alone)
    costs = replace(LAYER_COSTS, updates=(LAYER_COSTS.updates[0], gathering))
    layout = Layout(pipeline=1, data=2, zero=1)
    for factor in (0.5, 2.0):
        of = {name: tuple(factor if name == other else 1.0 for other in COSTS) for name in ("update", "communication")}
        update, communication = (update_seconds_per_parameter(scaled(costs, of[name]), layout) for name in of)
        assert update == pytest.approx((9.5 + 0.5 * factor) * alone)
        assert communication == pytest.approx((9.5 * factor + 0.5) * alone)


def test_a_stage_that_waits_for_others_inside_its_update_says_nothing_of_the_optimizer(tmp_path: Path) -> None:
    plan = PLANS[0]
    trial = measured(plan, tmp_path, PREDICTOR)
    first, last = trial.stages

    def predicted(trial: Measurement) -> float:
        calibrated = CalibratedPredictor(PREDICTOR)
        calibrated.observe(plan, trial, warmup_steps=1)
        return calibrated.epoch_seconds(PLANS[2])

    waiting = replace(last, optimizer_seconds=last.optimizer_seconds + first.backward_seconds)
    assert predicted(replace(trial, stages=(first, waiting))) == predicted(trial)
    both = tuple(replace(stage, optimizer_seconds=3 * stage.optimizer_seconds) for stage in trial.stages)
    assert predicted(replace(trial, stages=both)) > predicted(trial)


def test_a_machine_unlike_its_profile_is_learned_from_a_few_plans(tmp_path: Path) -> None:
    truth = predictor_of(scaled(LAYER_COSTS, TRUTH[:-1]))
    calibrated, held_out = CalibratedPredictor(PREDICTOR), PLANS[-1]
    before = abs(calibrated.predict(held_out).epoch_seconds / truth.predict(held_out).epoch_seconds - 1)
    width = calibrated.relative_error(held_out)
    for plan in PLANS[:-1]:
        calibrated.observe(plan, measured(plan, tmp_path, truth), warmup_steps=1)
    after = abs(calibrated.predict(held_out).epoch_seconds / truth.predict(held_out).epoch_seconds - 1)
    assert before > 0.08
    assert after < 0.03
    assert calibrated.relative_error(held_out) < width / 2


def test_how_much_other_programs_slow_trials_says_nothing_of_the_machine(tmp_path: Path) -> None:
    slowed = predictor_of(scaled(LAYER_COSTS, [1.5] * len(COSTS)))
    machines = dict(zip(PLANS, (PREDICTOR, PREDICTOR, slowed, slowed, slowed), strict=False))

    def error(*, says_so: bool) -> float:
        calibrated = CalibratedPredictor(PREDICTOR)
        for plan, machine in machines.items():
            is_disturbed = says_so and machine is slowed
            calibrated.observe(plan, measured(plan, tmp_path, machine), warmup_steps=1, is_disturbed=is_disturbed)
        return abs(calibrated.epoch_seconds(PLANS[-1]) / PREDICTOR.predict(PLANS[-1]).epoch_seconds - 1)

    assert error(says_so=False) > 0.2
    assert error(says_so=True) < 0.03


@pytest.mark.parametrize(
    ("zero", "bucket", "learns"),
    [(1, 0, (True, True)), (1, 1 << 20, (True, False)), (2, 0, (True, False)), (3, 0, (False, False))],
)
def test_passes_in_which_ranks_wait_or_average_gradients_say_nothing_of_the_layers(
    zero: ZeroStage, bucket: int, learns: tuple[bool, bool], tmp_path: Path
) -> None:
    plan = plan_of("5+4", data=2, zero=zero, packing=PACKED)
    plan = replace(plan, layout=replace(plan.layout, bucket_bytes=bucket))
    trial = measured(plan, tmp_path, PREDICTOR)

    def seconds(**factors: float) -> float:
        """Return what is predicted after a trial whose ranks report these multiples of their passes."""
        ranks = (
            replace(rank, **{name: factor * getattr(rank, name) for name, factor in factors.items()})
            for rank in trial.stages
        )
        calibrated = CalibratedPredictor(PREDICTOR)
        calibrated.observe(plan, replace(trial, stages=tuple(ranks)), warmup_steps=1)
        return calibrated.epoch_seconds(PLANS[0])

    found = tuple(seconds(**{name: 1.5}) != seconds() for name in ("forward_seconds", "backward_seconds"))
    assert found == learns


def test_peaks_are_compared_on_the_steps_that_ran(tmp_path: Path) -> None:
    measurement = measured(PLANS[0], tmp_path, PREDICTOR)
    for peak in peaks(PREDICTOR, PLANS[0], measurement, warmup_steps=1):
        assert peak.predicted.low < peak.measured < peak.predicted.high
        assert peak.predicted.expected == pytest.approx(peak.measured)


def test_the_same_trials_give_the_same_predictions(tmp_path: Path) -> None:
    first, second = CalibratedPredictor(PREDICTOR), CalibratedPredictor(PREDICTOR)
    for plan in PLANS[:3]:
        trial = measured(plan, tmp_path, PREDICTOR)
        first.observe(plan, trial, warmup_steps=1)
        second.observe(plan, trial, warmup_steps=1)
    assert (first.predict(PLANS[4]).step_seconds == second.predict(PLANS[4]).step_seconds).all()


def test_steps_of_another_epoch_teach_nothing(tmp_path: Path) -> None:
    trial = measured(PLANS[0], tmp_path, PREDICTOR)
    calibrated = CalibratedPredictor(PREDICTOR)
    calibrated.observe(PLANS[0], replace(trial, steps=(5000, 5001)), warmup_steps=1)
    assert (calibrated.predict(PLANS[0]).step_seconds == PREDICTOR.predict(PLANS[0]).step_seconds).all()


def test_memory_is_learnt_from_trials_that_ran_out_of_it_alone(tmp_path: Path) -> None:
    truth, held_out = predictor_of(keeping(1.10)), PLANS[-1]
    calibrated, settings = CalibratedPredictor(PREDICTOR), prepared_of(tmp_path, timed_steps=2).job.search
    for plan in PLANS[:-1]:
        fullest = max(measured(plan, tmp_path, truth).stages, key=lambda stage: stage.peak_bytes)
        limit = round(0.99 * fullest.peak_bytes)  # passed by little, though the stage was predicted to stay below it
        cause = OutOfMemory(stage=fullest.stage, rank=0, needed_bytes=limit + 1000, limit_bytes=limit)
        calibrated.learn(finished(plan, Failed(cause=cause)), settings)
    assert calibrated.trials == len(PLANS) - 1
    for before, after, real in zip(
        PREDICTOR.predict(held_out).stage_memory,
        calibrated.predict(held_out).stage_memory,
        truth.predict(held_out).stage_bytes,
        strict=True,
    ):
        assert abs(before.expected / real - 1) > 0.05
        assert abs(after.expected / real - 1) < 0.03
        assert after.low < real < after.high
    seconds = calibrated.predict(held_out).step_seconds
    assert (seconds == PREDICTOR.predict(held_out).step_seconds).all()


def test_crashes_and_rejected_plans_teach_nothing(tmp_path: Path) -> None:
    calibrated = CalibratedPredictor(PREDICTOR)
    for outcome in (Failed(cause=Crash(rank=0, detail="boom")), Rejected(reason="too large")):
        calibrated.learn(finished(PLANS[0], outcome), prepared_of(tmp_path).job.search)
    assert calibrated.trials == 0
