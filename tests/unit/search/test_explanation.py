"""Where the time of measured plans goes, and what changes of them give, on a small simulated job."""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autotune.prediction.predictor import Predictor
from autotune.search.explanation.changes import Changes
from autotune.search.explanation.explainer import Explainer
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from autotune.search.roles import Role
from autotune.search.winner import standings_of
from storage.explanation import BEST, Explanation, PlanTime
from storage.records import FinishedTrial
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.unit.prediction.test_sharded_weights import sharded
from tests.unit.prediction.test_shared_packs import levelled
from tests.unit.search.space.test_tensor_layouts import cut_costs
from tests.values.search import COSTS, finished, limits_of, predictor_of, runner_of
from tests.values.training import plan_of
from trials.costs.layer_costs import LoadCost
from trials.outcome import Completed, Failed, OutOfMemory, Rejected, StageMeasurement
from trials.plan import Layout, Packed, Padded, Plan

PADDED = Padded(samples=4)
DEFAULT = plan_of("5+0r5,0", "0+4r0,4", packing=PADDED)
LEAN = plan_of("5+0", "0+4", packing=PADDED)
BETTER = plan_of("4+0", "1+4", packing=Packed(qv=12, qt=480, qv_min=12, qt_min=416))
LEVELLED = levelled("5+0", "0+4", degrees=(1, 1), data=1, further=((5, 0), (0, 4)))
AMPLE, QUIET, PREDICTOR = 1 << 40, Behaviour(noise=0.002), predictor_of()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plan], FinishedTrial]:
    """Return the trial of a plan on a quiet machine that is as the profile says."""
    folder, launcher = tmp_path_factory.mktemp("machine"), SimulatedLauncher(PREDICTOR, QUIET)
    runner = runner_of(folder, launcher, AMPLE, PREDICTOR, timed_steps=4)

    @cache
    def trial(plan: Plan) -> FinishedTrial:
        result = runner.run(plan)
        assert isinstance(result.outcome, Completed)
        return finished(
            plan,
            result.outcome,
            epoch_seconds=result.epoch_seconds or 0.0,
            epoch_seconds_error=result.epoch_seconds_error or 0.0,
        )

    return trial


def explained(
    *trials: tuple[Role, FinishedTrial],
    predictor: Predictor | None = None,
    memory: int = AMPLE,
    missing: Callable[[Plan], str | None] = lambda _: None,
    changes_learning: Container[Plan] = (),
) -> Explanation | None:
    calibrated = CalibratedPredictor(predictor or PREDICTOR)
    calibrated.learning_faults = lambda plan: ("unlike random steps",) if plan in changes_learning else ()
    surrogate, known = Surrogate(calibrated), [replace(trial, role=str(role)) for role, trial in trials]
    for trial in known:
        surrogate.learn(trial)
    roles = {trial.plan: frozenset({trial.role}) for trial in known}
    standings = standings_of(known, surrogate, roles, is_neutral=lambda plan: plan not in changes_learning)
    explainer = Explainer(
        predictor=calibrated,
        surrogate=surrogate,
        limits=limits_of(memory),
        trials=known,
        study_id=known[0].study_id,
        samples=1000,
        not_run=("packed",),
        roles=roles,
        missing=missing,
    )
    return explainer.explain(standings, standings.winner())


def times(explanation: Explanation | None) -> dict[str, PlanTime]:
    assert explanation is not None
    assert explanation.not_run == ("packed",)
    for plan in explanation.plans:
        assert sum(part.seconds for part in plan.parts) == pytest.approx(plan.epoch_seconds)
    return {plan.role: plan for plan in explanation.plans}


def slower(trial: FinishedTrial, change: Callable[[StageMeasurement], StageMeasurement]) -> FinishedTrial:
    """Return the trial with other measurements of its ranks."""
    outcome = trial.result.outcome
    assert isinstance(outcome, Completed)
    measurement = replace(outcome.measurement, stages=tuple(map(change, outcome.measurement.stages)))
    return replace(trial, result=replace(trial.result, outcome=replace(outcome, measurement=measurement)))


def shortened(trial: FinishedTrial) -> FinishedTrial:
    outcome = trial.result.outcome
    assert isinstance(outcome, Completed)
    return replace(trial, result=replace(trial.result, outcome=replace(outcome, shortened=True)))


def test_a_run_that_goes_as_predicted_has_the_predicted_parts(run: Callable[[Plan], FinishedTrial]) -> None:
    plans = {Role.DEFAULT: DEFAULT, Role.HBP: LEVELLED, Role.SAMPLED: BETTER}
    found = times(explained(*((role, run(plan)) for role, plan in plans.items())))
    for role, plan in (("default", DEFAULT), ("hbp", LEVELLED), (BEST, BETTER)):
        for name, seconds in PREDICTOR.predict(plan).breakdown.totals.items():
            tolerance = 0.02 * found[role].epoch_seconds
            assert found[role].part(name).seconds == pytest.approx(seconds, rel=0.02, abs=tolerance), name
        assert abs(found[role].part("unexplained").seconds) < 0.01 * found[role].epoch_seconds


def test_a_stage_that_the_ranks_measure_as_slow_is_imbalance_though_the_profile_does_not_know(
    run: Callable[[Plan], FinishedTrial],
) -> None:
    def sick(rank: StageMeasurement) -> StageMeasurement:
        factor = 5.0 if rank.stage == 0 else 1.0
        return replace(
            rank, forward_seconds=factor * rank.forward_seconds, backward_seconds=factor * rank.backward_seconds
        )

    usual = run(DEFAULT)
    before, after = (times(explained((Role.DEFAULT, trial)))[BEST] for trial in (usual, slower(usual, sick)))
    more = after.part("stage_imbalance").seconds - before.part("stage_imbalance").seconds
    assert more > 0.5 * before.epoch_seconds


def test_waiting_for_data_that_workers_should_have_loaded_is_a_part(run: Callable[[Plan], FinishedTrial]) -> None:
    """With workers the predicted waiting is 0; the measured one counts nevertheless."""
    usual, ahead = run(DEFAULT), predictor_of(replace(COSTS, loading=LoadCost()))
    late = slower(usual, lambda rank: replace(rank, load_seconds=0.1))
    prompt = slower(usual, lambda rank: replace(rank, load_seconds=0.0))
    none, some = (times(explained((Role.DEFAULT, each), predictor=ahead)) for each in (prompt, late))
    steps = some[BEST].steps
    assert none[BEST].part("loading").seconds == pytest.approx(0.0, abs=1e-9)
    # Each of the two stages waits for a tenth of a second a step, the second one mostly while the first one does.
    assert 0.1 * steps * 0.9 < some[BEST].part("loading").seconds < 0.2 * steps * 1.1


@pytest.mark.parametrize("fastest", [Role.CURRENT_PLAN, Role.DEFAULT, Role.OMNIBAL])
def test_the_usual_settings_are_the_fastest_baseline(run: Callable[[Plan], FinishedTrial], fastest: Role) -> None:
    others = [role for role in (Role.CURRENT_PLAN, Role.DEFAULT, Role.OMNIBAL) if role != fastest]
    slow = zip(others, (DEFAULT, replace(DEFAULT, packing=Padded(samples=2))), strict=True)
    trials = [(role, run(plan)) for role, plan in slow]
    found = explained(*trials, (fastest, run(LEAN)), (Role.SAMPLED, run(BETTER)))
    assert found is not None
    assert found.usual == fastest
    assert found.of_usual == times(found)[fastest]
    assert found.of_usual.epoch_seconds == min(time.epoch_seconds for time in found.plans[1:])


def test_a_baseline_that_ended_early_is_not_the_usual_settings_where_another_did_not(
    run: Callable[[Plan], FinishedTrial],
) -> None:
    trials = (Role.DEFAULT, run(DEFAULT)), (Role.CURRENT_PLAN, shortened(run(LEAN))), (Role.SAMPLED, run(BETTER))
    found = explained(*trials)
    assert found is not None
    assert found.usual == "default"


def test_the_default_that_is_explained_is_the_one_that_the_winner_is_compared_with(
    run: Callable[[Plan], FinishedTrial],
) -> None:
    """LEAN is faster but ran once, so it may have been lucky."""
    trials = [(Role.DEFAULT, run(LEAN)), (Role.SAMPLED, run(BETTER)), *[(Role.DEFAULT, run(DEFAULT))] * 2]
    assert times(explained(*trials))["default"].plan == DEFAULT


def test_a_default_that_ran_out_of_memory_leaves_its_place_to_one_that_was_measured(
    run: Callable[[Plan], FinishedTrial],
) -> None:
    failed = finished(DEFAULT, Failed(cause=OutOfMemory(stage=0, rank=0, needed_bytes=2, limit_bytes=1)))
    lean = shortened(run(LEAN))
    found = times(explained((Role.DEFAULT, failed), (Role.DEFAULT, lean), (Role.SAMPLED, run(BETTER))))
    assert (found["default"].plan, found["default"].shortened) == (LEAN, True)


def test_baselines_without_a_result_are_named_with_the_reason(run: Callable[[Plan], FinishedTrial]) -> None:
    cause = OutOfMemory(stage=0, rank=0, needed_bytes=2 << 20, limit_bytes=1 << 20)
    failed, rejected = finished(LEAN, Failed(cause=cause)), finished(plan_of("3+0", "2+4"), Rejected(reason="80 MiB"))
    tried = (Role.CURRENT_PLAN, failed), (Role.OMNIBAL, rejected), (Role.DEFAULT, run(DEFAULT))
    found = explained(*tried, (Role.SAMPLED, run(BETTER)))
    assert found is not None
    reasons = {each.role: each.reason for each in found.failed}
    assert reasons == {"current-plan": str(cause), "omnibal": "80 MiB"}


def test_a_winner_for_a_trainer_is_explained_against_what_it_holds(run: Callable[[Plan], FinishedTrial]) -> None:
    trials = (Role.DEFAULT, run(DEFAULT)), (Role.OMNIBAL, run(LEAN)), (Role.SAMPLED, run(BETTER))
    usual = [explained(*trials, missing={LEAN: without}.get) for without in (None, "recomputation")]
    assert [each.usual for each in usual if each is not None] == ["omnibal", "default"]


@pytest.mark.parametrize("is_shortened", [False, True])
def test_a_winner_is_explained_against_what_could_be_used_instead(
    is_shortened: bool, run: Callable[[Plan], FinishedTrial]
) -> None:
    """LEAN is the faster one of the two that did not win, but it changes what is learned."""
    slow = shortened(run(DEFAULT)) if is_shortened else run(DEFAULT)
    trials = (Role.OMNIBAL, run(BETTER)), (Role.HBP, run(LEAN)), (Role.DEFAULT, slow)
    found = explained(*trials, changes_learning={LEAN})
    assert found is not None
    assert (found.winner.plan, found.usual) == (BETTER, "default")
    assert {each.change for each in found.changes} >= {"packing"}
    alone = explained(*trials[:2], changes_learning={LEAN})
    assert alone is not None
    assert (alone.usual, alone.changes) == ("omnibal", ())
    only = explained((Role.SAMPLED, run(BETTER)), trials[1], changes_learning={LEAN})
    assert only is not None
    assert only.usual == "hbp"


def test_usual_settings_that_won_need_no_changes(run: Callable[[Plan], FinishedTrial]) -> None:
    found = explained((Role.DEFAULT, run(DEFAULT)))
    assert found is not None
    assert (found.usual, found.changes) == ("default", ())
    assert found.further


def test_the_winner_is_compared_with_ties_that_are_no_baselines(run: Callable[[Plan], FinishedTrial]) -> None:
    plans = {Role.SAMPLED: BETTER, Role.PREDICTED: LEAN, Role.OMNIBAL: DEFAULT}
    found = explained(*((role, replace(run(BETTER), plan=plan)) for role, plan in plans.items()))
    assert found is not None
    tied = {tie.plan_id for tie in found.tied}
    assert tied == {BETTER.id, LEAN.id} - {found.winner.plan_id}
    for tie in found.tied:
        assert tie.role == f"tie {tie.plan_id}"
        assert tie.gain == pytest.approx(1, rel=0.01)
        assert tie.estimated_samples_per_second == pytest.approx(1000 / found.winner.epoch_seconds, rel=0.01)


def test_runs_of_other_studies_explain_nothing(run: Callable[[Plan], FinishedTrial]) -> None:
    """Their job may have had another seed, with which steps of the same numbers have other packs."""
    foreign = replace(slower(run(DEFAULT), lambda rank: replace(rank, load_seconds=9.0)), study_id="6" * 32)
    best, own = (Role.SAMPLED, run(BETTER)), run(DEFAULT)
    assert [*times(explained(best, (Role.DEFAULT, foreign)))] == [BEST]
    found = times(explained(best, (Role.DEFAULT, own), (Role.DEFAULT, foreign)))["default"]
    assert found.runs == 1
    assert found.part("loading").seconds < 9.0


def test_a_default_that_ended_early_is_explained_from_the_steps_that_ran(run: Callable[[Plan], FinishedTrial]) -> None:
    found = times(explained((Role.DEFAULT, shortened(run(DEFAULT))), (Role.SAMPLED, run(BETTER))))
    assert found["default"].shortened
    assert found["default"].epoch_seconds == pytest.approx(run(DEFAULT).result.epoch_seconds)
    assert not found[BEST].shortened


def test_only_disturbed_runs_are_named(run: Callable[[Plan], FinishedTrial]) -> None:
    usual, quiet = run(DEFAULT), run(DEFAULT)
    disturbed = replace(usual, result=replace(usual.result, disturbance="others"))
    assert times(explained((Role.DEFAULT, disturbed)))[BEST].disturbed
    both = times(explained((Role.DEFAULT, disturbed), (Role.DEFAULT, quiet)))[BEST]
    assert (both.disturbed, both.runs) == (False, 1)


def test_a_search_without_a_measured_baseline_explains_its_winner_alone(run: Callable[[Plan], FinishedTrial]) -> None:
    failed = finished(DEFAULT, Failed(cause=OutOfMemory(stage=0, rank=0, needed_bytes=2, limit_bytes=1)))
    found = explained((Role.SAMPLED, run(BETTER)), (Role.DEFAULT, failed))
    assert [*times(found)] == [BEST]
    assert found is not None
    assert (found.usual, found.changes) == (None, ())


def test_runs_of_steps_or_ranks_that_this_epoch_does_not_have_explain_nothing(
    run: Callable[[Plan], FinishedTrial],
) -> None:
    """As after a change of the seed, for which trials are kept."""
    usual = run(DEFAULT)
    outcome = usual.result.outcome
    assert isinstance(outcome, Completed)
    steps = tuple(step + 1000 for step in outcome.measurement.steps)
    measured = outcome.measurement
    for measurement in (replace(measured, steps=steps), replace(measured, stages=measured.stages[:1])):
        other = replace(usual, result=replace(usual.result, outcome=replace(outcome, measurement=measurement)))
        assert explained((Role.DEFAULT, other)) is None


def test_errors_grow_with_those_of_the_measurement(run: Callable[[Plan], FinishedTrial]) -> None:
    usual = run(DEFAULT)
    unsure = replace(usual, result=replace(usual.result, epoch_seconds_error=usual.result.epoch_seconds))
    sure, vague = (times(explained((Role.DEFAULT, trial)))[BEST] for trial in (usual, unsure))
    for name in ("ideal", "stage_imbalance", "unexplained"):
        assert vague.part(name).error > 3 * sure.part(name).error, name


# --- what changes give ---


def changes_of(trials: Sequence[FinishedTrial], memory: int = AMPLE) -> Changes:
    calibrated = CalibratedPredictor(PREDICTOR)
    surrogate = Surrogate(calibrated)
    for trial in trials:
        surrogate.learn(trial)
    measured = [trial.plan for trial in trials if isinstance(trial.result.outcome, Completed)]
    return Changes(calibrated, surrogate, limits_of(memory), trials, measured)


def time_of(plan: Plan, seconds: float) -> PlanTime:
    return PlanTime(
        plan=plan,
        role="default",
        epoch_seconds=seconds,
        epoch_seconds_error=0.01 * seconds,
        steps=15,
        parts=(),
        stage_peak_bytes=(1,),
        runs=1,
    )


def test_each_change_alone_is_predicted_where_it_was_not_measured(run: Callable[[Plan], FinishedTrial]) -> None:
    trials = [run(DEFAULT), run(BETTER), run(LEAN)]
    effects = changes_of(trials).towards(BETTER, DEFAULT, time_of(DEFAULT, 100.0))
    found = {effect.change: effect for effect in effects}
    assert [*found] == ["packing", "split", "recompute"]
    assert found["packing"].plan == replace(DEFAULT, packing=BETTER.packing)
    assert found["split"].plan == plan_of("4+0r4,0", "1+4r1,4", packing=PADDED)
    assert (found["recompute"].plan, found["recompute"].measured) == (LEAN, True)
    for effect in effects:
        true = PREDICTOR.epoch_seconds(DEFAULT) / PREDICTOR.epoch_seconds(effect.plan)
        assert effect.gain == pytest.approx(true, rel=0.02), effect.change
        assert effect.epoch_seconds * effect.gain == pytest.approx(100.0)
        assert effect.fits


def test_a_change_that_does_not_fit_says_so(run: Callable[[Plan], FinishedTrial]) -> None:
    least = max(PREDICTOR.predict(DEFAULT).stage_bytes)
    packed = replace(DEFAULT, packing=BETTER.packing)
    ran_out = finished(packed, Failed(cause=OutOfMemory(stage=1, rank=1, needed_bytes=12345, limit_bytes=12000)))
    effects = changes_of([run(DEFAULT), ran_out], round(1.05 * least)).towards(BETTER, DEFAULT, time_of(DEFAULT, 100.0))
    found = {effect.change: effect for effect in effects}
    assert (found["packing"].fits, found["packing"].peak_bytes) == (False, 12345)


def test_changes_that_the_winner_does_not_make_are_left_out(run: Callable[[Plan], FinishedTrial]) -> None:
    changes = changes_of([run(DEFAULT)])
    assert [effect.change for effect in changes.towards(LEAN, DEFAULT, time_of(DEFAULT, 100.0))] == ["recompute"]
    assert changes.towards(LEAN, LEAN, time_of(LEAN, 100.0)) == ()
    assert changes.without_recompute(LEAN, time_of(LEAN, 100.0)) == ()
    (further,) = changes.without_recompute(DEFAULT, time_of(DEFAULT, 100.0))
    assert further.plan == LEAN
    assert further.gain > 1.1


def test_waiting_for_other_ranks_inside_of_passes_with_zero_3_is_no_slow_work(tmp_path: Path) -> None:
    predictor = predictor_of(sharded(seconds=(1e-4,) * 5))
    plans = {"default": plan_of("5+4r5,4", data=2, zero=3, packing=PADDED), BEST: plan_of("5+4", data=2, zero=3)}
    runner = runner_of(tmp_path, SimulatedLauncher(predictor, QUIET), predictor=predictor, timed_steps=4)
    runs = []
    for role, plan in zip((Role.DEFAULT, Role.SAMPLED), plans.values(), strict=True):
        result = runner.run(plan)
        assert isinstance(result.outcome, Completed)
        sizes = predictor.sizes(plan.packing, plan.layout)
        seconds = predictor.times.plan_seconds(plan, sizes)
        rows = [sizes.epoch.rows(step) for step in result.outcome.measurement.steps]
        # Each pass of a rank takes as long as that of the slowest one.
        forward, backward = (
            float(np.mean([side[each, 0].max(axis=1).sum() for each in rows]))
            for side in (seconds.forward + seconds.exchange, seconds.shared_backward)
        )
        trial = finished(plan, result.outcome, epoch_seconds=result.epoch_seconds or 0.0, epoch_seconds_error=0.01)

        def waiting(rank: StageMeasurement, passes: tuple[float, float] = (forward, backward)) -> StageMeasurement:
            return replace(rank, forward_seconds=passes[0], backward_seconds=passes[1])

        runs.append((role, slower(trial, waiting)))
    found = times(explained(*runs, predictor=predictor))
    for name_of_plan, plan in plans.items():
        totals, whole = predictor.predict(plan).breakdown.totals, found[name_of_plan].epoch_seconds
        assert totals["data_imbalance"] > 0.02 * whole
        for name, of_part in totals.items():
            assert found[name_of_plan].part(name).seconds == pytest.approx(of_part, rel=0.02, abs=0.02 * whole), name


def test_what_tensor_ranks_exchange_is_communication_and_no_slow_work(tmp_path: Path) -> None:
    costs = cut_costs(seconds=1e-3)
    cut = Layout(pipeline=2, data=1, tensor=2, zero=0)
    plans = {"default": replace(DEFAULT, layout=cut), BEST: replace(BETTER, layout=cut)}
    machine = SimulatedLauncher(predictor_of(costs), QUIET)
    runner = runner_of(tmp_path, machine, predictor=predictor_of(costs), timed_steps=4)
    runs = []
    for role, plan in zip((Role.DEFAULT, Role.SAMPLED), plans.values(), strict=True):
        result = runner.run(plan)
        trial = finished(plan, result.outcome, epoch_seconds=result.epoch_seconds or 0.0, epoch_seconds_error=0.01)
        runs.append((role, trial))
    found = times(explained(*runs, predictor=predictor_of(costs)))
    for name_of_plan, plan in plans.items():
        predicted, whole = predictor_of(costs).predict(plan).breakdown.totals, found[name_of_plan].epoch_seconds
        assert predicted["communication"] > 0.05 * whole
        for name, of_part in predicted.items():
            assert found[name_of_plan].part(name).seconds == pytest.approx(of_part, rel=0.02, abs=0.02 * whole), name
