"""Excerpts of long epochs: what is in them, and that plans are compared on them as on whole epochs."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

import autotune.search.learning.calibrated as calibrated_module
import autotune.search.learning.excerpt as module
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.excerpt import Excerpt
from autotune.search.sampling.advisor import Advisor
from autotune.search.solver.solver import Solver
from autotune.search.space.space import Space
from tests.machines.simulated import Behaviour, SimulatedLauncher, Undisturbed
from tests.values.data import WEIGHTS, index_of
from tests.values.search import BATCH, COSTS, axes_of, finished, limits_of, prepared_of, random_rows
from tests.values.training import job_of
from trials.data.epoch import EpochSettings
from trials.data.order import epoch_order
from trials.outcome import Completed, Rejected
from trials.plan import Layout, Packed, Plan

SAMPLES = 800
LONG = index_of([*random_rows(3000), (9, 40), (0, 900)])
"""The last two have most units and most tokens."""
LIMITS = limits_of(150 << 20)


def settings(batch: int, seed: int = 0) -> EpochSettings:
    return EpochSettings(global_batch_samples=batch, weights=WEIGHTS, seed=seed)


@pytest.fixture(autouse=True)
def _short_excerpts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAMPLES", SAMPLES)
    monkeypatch.setattr(module, "_MOST_SAMPLES", SAMPLES)


def calibrated_of(folder: Path, batch: int = BATCH) -> CalibratedPredictor:
    job = job_of(folder, folder, training={"global_batch_samples": batch, "seed": 3})
    return CalibratedPredictor.of_job(job, LONG, WEIGHTS, costs=COSTS, element_bytes=4)


def test_a_short_epoch_is_its_own_excerpt() -> None:
    index = index_of(random_rows(SAMPLES))
    assert Excerpt.of(index, settings(BATCH)) == Excerpt(index=index, share=1.0)


@pytest.mark.parametrize("batch", [pytest.param(BATCH, marks=pytest.mark.long), 1000])
def test_an_excerpt_has_the_longest_samples_and_at_least_a_step(batch: int) -> None:
    found = Excerpt.of(LONG, settings(batch, 3))
    assert max(SAMPLES, batch) <= len(found.index) <= max(SAMPLES, batch) + 2
    assert found.index.vision_units.max() == 9
    assert found.index.text_tokens.max() == 900
    # The others are those that the training sees first.
    first = epoch_order(LONG, 3, 0)[: max(SAMPLES, batch)]
    assert set(LONG.record[first]) <= set(found.index.record)
    assert found.share == pytest.approx(len(found.index) / len(LONG), rel=0.1)


def test_an_excerpt_has_more_samples_where_few_long_ones_take_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_SAMPLES", 30_000)
    lengths = np.where(np.random.default_rng(0).random(30_000) < 0.01, 400, 40)
    index = index_of([(0, tokens) for tokens in lengths.tolist()])
    found = Excerpt.of(index, settings(BATCH))
    cost = WEIGHTS.token * lengths + WEIGHTS.square * lengths.astype(float) ** 2
    assert cost.std() / cost.mean() / len(found.index) ** 0.5 == pytest.approx(0.02, rel=0.01)


def test_an_excerpt_has_a_limit_of_samples() -> None:
    index = index_of([(0, 4000 if number % 100 == 0 else 40) for number in range(3000)])
    assert len(Excerpt.of(index, settings(BATCH)).index) <= SAMPLES + 1


def test_the_share_of_an_excerpt_is_that_of_its_costs() -> None:
    found = Excerpt.of(LONG, settings(BATCH, 3))
    whole, part = (
        WEIGHTS.unit * index.vision_units
        + WEIGHTS.token * index.text_tokens
        + WEIGHTS.square * index.text_tokens.astype(float) ** 2
        for index in (LONG, found.index)
    )
    assert found.share == pytest.approx(part.sum() / whole.sum())


def test_repeated_samples_are_drawn_as_often_as_they_are_shown() -> None:
    index = index_of(random_rows(1000), repeats=(3.0,))
    found = Excerpt.of(index, settings(2900))
    assert np.bincount(found.index.record).max() == 3
    # An epoch of the excerpt shows each of its rows once.
    assert 2900 <= len(epoch_order(found.index, 0, 0)) == len(found.index) <= 2902


@pytest.mark.parametrize("batch", [pytest.param(BATCH, marks=pytest.mark.long), 350])
def test_times_and_bytes_on_an_excerpt_are_nearly_those_of_the_epoch(batch: int, tmp_path: Path) -> None:
    """With 350 samples a step, the second step of the excerpt is cut short: it must not count as many short steps."""
    calibrated = calibrated_of(tmp_path, batch)
    space = Space(axes_of(devices=4), Solver(calibrated.profiled, LIMITS))
    plans = space.starts
    predicted = [calibrated.predict(plan) for plan in plans]
    kept = [number for number, each in enumerate(predicted) if each.keeps_batch]
    assert len(kept) > 6
    ratios = np.array(calibrated.plans_epoch_seconds(plans)) / [each.epoch_seconds for each in predicted]
    assert ratios[kept].std() < 0.02
    assert ratios[kept].mean() == pytest.approx(1, abs=0.03)
    steps = calibrated.steps_seconds(plans) / [np.median(each.step_seconds) for each in predicted]
    assert steps[kept].mean() == pytest.approx(1, abs=0.05)
    peaks = [max(stage.expected for stage in stages) for stages in calibrated.plans_memory(plans)]
    assert np.array(peaks) == pytest.approx([max(each.stage_bytes) for each in predicted], rel=0.1)


def test_the_plan_that_is_tried_first_is_as_fast_as_on_whole_epochs(tmp_path: Path) -> None:
    calibrated = calibrated_of(tmp_path)
    whole = CalibratedPredictor(calibrated.base)

    def first(predictor: CalibratedPredictor) -> float:
        space = Space(axes_of(devices=4), Solver(predictor.profiled, LIMITS))
        advisor = Advisor(space, predictor, LIMITS, job_of(tmp_path, tmp_path).search)
        return whole.epoch_seconds(next(advisor.predicted(1.2)))

    assert first(calibrated) <= 1.01 * first(whole)


@pytest.mark.parametrize("excerpt", [SAMPLES, pytest.param(len(LONG), marks=pytest.mark.long)])
def test_sizes_of_packings_that_were_compared_are_dropped(
    excerpt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are freed without waiting for the garbage collector."""
    monkeypatch.setattr(module, "_SAMPLES", excerpt)
    monkeypatch.setattr(calibrated_module, "_KEPT_SAMPLES", 12 * excerpt)
    predictor = calibrated_of(tmp_path).profiled
    solver, layout = Solver(predictor, LIMITS), Layout(pipeline=2, data=2, zero=0)
    gc.disable()
    try:
        compared, solved = [], 0
        for qv in range(9, 33):
            packing = Packed(qv=qv, qt=1000, qv_min=qv, qt_min=0, packer="best-fit")
            solved += solver.solve(packing, layout) is not None
            compared.append(weakref.ref(predictor.sizes(packing, layout)))
        kept = [each for each in compared if each() is not None]
    finally:
        gc.enable()
    assert solved > 12
    assert 8 <= len(kept) <= 12
    assert compared[-1] in kept


def test_trials_run_steps_of_the_whole_epoch_and_correct_the_excerpt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_SAMPLES", "_MOST_SAMPLES"):
        monkeypatch.setattr(module, limit, SAMPLES // 2)
    calibrated = calibrated_of(tmp_path)
    plan, *_, other = Space(axes_of(devices=2), Solver(calibrated.profiled, LIMITS)).starts
    before = calibrated.epoch_seconds(other)
    slower = SimulatedLauncher(calibrated.base.with_costs(scaled(COSTS, [1.3] * len(FACTORS))))
    prepared = prepared_of(tmp_path, timed_steps=8)
    outcome = Runner(prepared, calibrated, slower, watch=Undisturbed).run(plan).outcome
    assert isinstance(outcome, Completed)
    assert max(outcome.measurement.steps) > calibrated.profiled.sizes(plan.packing, plan.layout).epoch_steps
    calibrated.observe(plan, outcome.measurement, prepared.job.search.warmup_steps)
    assert calibrated.epoch_seconds(other) / before == pytest.approx(1.3, rel=0.05)


def long_tailed(folder: Path) -> CalibratedPredictor:
    """Predict samples of which few are long: where several of these meet in a step, it is seldom one of the excerpt."""
    tokens = np.minimum(np.random.default_rng(0).lognormal(np.log(100), 1.0, 4000), 1500).astype(int) + 20
    index = index_of([(units, tokens) for (units, _), tokens in zip(random_rows(4000), tokens.tolist(), strict=True)])
    job = job_of(folder, folder, training={"global_batch_samples": 64, "seed": 3})
    return CalibratedPredictor.of_job(job, index, WEIGHTS, costs=COSTS, element_bytes=4)


def test_few_proposals_are_rejected_where_the_heaviest_packs_are_not_in_the_excerpt(tmp_path: Path) -> None:
    calibrated, memory = long_tailed(tmp_path), 40 << 20
    limits, prepared = limits_of(memory), prepared_of(tmp_path, memory)
    space = Space(axes_of(devices=4), Solver(calibrated.profiled, limits))
    advisor = Advisor(space, calibrated, limits, prepared.job.search)
    launcher = SimulatedLauncher(calibrated.base, Behaviour(noise=0.002), world_size=4)
    runner = Runner(prepared, calibrated, launcher, watch=Undisturbed)
    rejected, light = [], 0
    for number in range(14):
        proposal = advisor.propose()
        assert proposal is not None
        plan = proposal.plan
        if rejection := runner.rejection(plan):
            rejected.append(number)
            advisor.learn(finished(plan, rejection, number))
            continue
        result = runner.run(plan)
        assert isinstance(result.outcome, Completed)
        seconds, error = result.epoch_seconds or 0.0, result.epoch_seconds_error or 0.0
        trial = finished(plan, result.outcome, number, epoch_seconds=seconds, epoch_seconds_error=error)
        advisor.learn(trial)
        predictors = calibrated.profiled, calibrated.base
        in_excerpt, in_epoch = (max(predictor.predict(plan).stage_bytes) for predictor in predictors)
        light += in_excerpt < 0.98 * in_epoch
    assert light > 3
    assert len(rejected) <= 2


def test_a_plan_that_does_not_fit_the_whole_epoch_teaches_how_much_heavier_its_packs_are(tmp_path: Path) -> None:
    calibrated = long_tailed(tmp_path)
    starts = Space(axes_of(devices=4), Solver(calibrated.profiled, limits_of(40 << 20))).starts

    def excess(plan: Plan) -> float:
        return max(calibrated.base.predict(plan).stage_bytes) / max(calibrated.profiled.predict(plan).stage_bytes)

    plan, other = max(starts, key=excess), min(starts, key=excess)
    assert excess(plan) > 1.02
    before, kept = calibrated.memory(other), calibrated.factors[-1]
    calibrated.learn(finished(plan, Rejected(reason="it does not fit")), prepared_of(tmp_path).job.search)
    fullest = [max(stage.expected for stage in stages) for stages in (calibrated.memory(plan), before)]
    assert fullest[0] == pytest.approx(max(calibrated.base.predict(plan).stage_bytes), rel=1e-3)
    # Of packs that are not known half as much is expected.
    factor = calibrated.factors[-1] / kept
    assert 1.01 < factor < excess(plan)
    for stage, lighter in zip(calibrated.memory(other), before, strict=True):
        assert stage.expected - stage.static == pytest.approx(factor * (lighter.expected - lighter.static))
    assert calibrated.corrected.plans_memory((other,))[0][0].expected == pytest.approx(
        calibrated.memory(other)[0].expected
    )
    # Times are those of the excerpt, as before.
    assert calibrated.epoch_factor == pytest.approx(long_tailed(tmp_path).epoch_factor)
