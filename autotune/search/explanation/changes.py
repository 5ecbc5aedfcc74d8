"""What single changes give: of the fastest baseline towards the winner, and of the winner with more memory."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import layer_counts
from storage.explanation import Change, ChangeEffect, PlanTime
from storage.records import FinishedTrial
from trials.errors import DataError, InvalidPlan
from trials.outcome import Completed, Failed, OutOfMemory
from trials.plan import Layout, Packing, Plan
from trials.stage import TOWERS, Recomputed, Stage


class Changes:
    """Estimates of changed plans, from the trials of a search and the predictions that these corrected."""

    def __init__(
        self,
        predictor: CalibratedPredictor,
        surrogate: Surrogate,
        limits: Limits,
        trials: Iterable[FinishedTrial],
        measured: Sequence[Plan],
    ) -> None:
        """`measured` are the plans that whole trials rank."""
        self._predictor, self._surrogate, self._limits = predictor, surrogate, limits
        self._trials, self._measured = tuple(trials), frozenset(measured)

    def towards(self, winner: Plan, usual: Plan, time: PlanTime) -> tuple[ChangeEffect, ...]:
        """Return the effects of the winner's packing, split and recomputation on the fastest baseline, each alone.

        `time` is that of the fastest baseline.
        """
        return tuple(self._effect(change, usual, plan, time) for change, plan in self._variants(winner, usual))

    def without_recompute(self, winner: Plan, time: PlanTime) -> tuple[ChangeEffect, ...]:
        """Return the effect of more memory on the winner, in which no layer is recomputed; empty if none is now.

        `time` is that of the winner.
        """
        nothing = [Recomputed(vision=0, language=0)] * len(winner.packing.degrees)
        stages = tuple(stage.recomputing(nothing) for stage in winner.stages)
        if stages == winner.stages:
            return ()
        return (self._effect("no-recompute", winner, replace(winner, stages=stages), time),)

    def ways_to_fit(self, winner: Plan, time: PlanTime) -> tuple[ChangeEffect, ...]:
        """Return the effects of fitting the winner's packs into the memory in one way alone, the fastest first.

        `time` is that of the winner. Ways that were not profiled, or with which nothing fits, are left out. Without
        any where the packs fit in data parallelism as they are.
        """
        if winner.layout.tensor > 1 or not _frees_memory(winner) or self._fits_as_it_is(winner):
            return ()
        solver = Solver(self._predictor.corrected, self._limits)
        effects = []
        for change, layouts in _ways(winner.layout, solver.layers):
            seconds: dict[Layout, float] = {}
            for each in layouts:
                # Some have too few data ranks to share the packs.
                with suppress(InvalidPlan, DataError):
                    if solver.unprofiled(each) is None:
                        seconds[each] = solver.least_seconds(winner.packing, each)
            layout = min(seconds, key=seconds.__getitem__, default=None)
            if layout and solver.keeps_batch(winner.packing, layout):
                plan = solver.solve(winner.packing, layout)
                effects += [self._effect(change, winner, plan, time)] if plan else []
        return tuple(sorted((effect for effect in effects if effect.fits), key=lambda effect: -effect.gain))

    def _fits_as_it_is(self, winner: Plan) -> bool:
        """Return whether the winner's packs fit the whole model on each rank, with nothing recomputed."""
        vision, language = (sum(getattr(stage, tower) for stage in winner.stages) for tower in TOWERS)
        whole = Stage(vision=vision, language=language)
        nothing = [Recomputed(vision=0, language=0)] * len(winner.packing.degrees)
        # Some have too few data ranks to share the packs.
        with suppress(InvalidPlan, DataError):
            plan = replace(winner, layout=_alone(winner.layout), stages=(whole.recomputing(nothing),))
            return not self._peak(plan)[1]
        return False

    def _variants(self, winner: Plan, usual: Plan) -> Iterator[tuple[Change, Plan]]:
        """Yield the variants that differ from the fastest baseline and keep the global batch."""
        solver = Solver(self._predictor.corrected, self._limits)
        # Some data have too few samples for the packs of a variant.
        with suppress(InvalidPlan, DataError):
            if usual.packing != winner.packing and solver.keeps_batch(winner.packing, usual.layout):
                yield "packing", repacked(usual, winner.packing)
        with suppress(InvalidPlan, DataError):
            split = resplit(usual, winner)
            if split != usual and solver.keeps_batch(split.packing, split.layout):
                yield "split", split
        with suppress(InvalidPlan, DataError):
            lean = solver.fit(usual.packing, usual.layout, usual.boundaries)
            if lean is not None and lean != usual:
                yield "recompute", lean

    def _effect(self, change: Change, before: Plan, plan: Plan, time: PlanTime) -> ChangeEffect:
        is_measured = {before, plan} <= self._measured
        estimate = self._surrogate.measured if is_measured else self._surrogate.posterior
        faster, error = estimate((before, plan)).difference(0, 1)
        if plan not in self._measured:
            # A choice: the posterior knows this doubt in part, and its errors were found to be too small.
            error = math.hypot(error, self._predictor.relative_error(plan))
        gain = math.exp(faster)
        # From the stated time of the plan before, so that the figures agree with each other.
        seconds = time.epoch_seconds / gain
        peak, is_exceeded = self._peak(plan)
        return ChangeEffect(
            change=change,
            plan=plan,
            epoch_seconds=seconds,
            epoch_seconds_error=seconds * math.hypot(time.epoch_seconds_error / time.epoch_seconds, error),
            gain=gain,
            gain_error=gain * error,
            peak_bytes=peak,
            fits=not is_exceeded,
            measured=is_measured,
        )

    def _peak(self, plan: Plan) -> tuple[int, bool]:
        """Return (bytes of the fullest rank, whether they exceed the limit): measured, else predicted."""
        outcomes = [trial.result.outcome for trial in self._trials if trial.plan == plan]
        if ran := [outcome.measurement.peak_bytes for outcome in outcomes if isinstance(outcome, Completed)]:
            return max(ran), False
        causes = [outcome.cause for outcome in outcomes if isinstance(outcome, Failed)]
        if failed := [cause.needed_bytes for cause in causes if isinstance(cause, OutOfMemory)]:
            return max(failed), True
        memory = self._predictor.memory(plan)
        expected = round(max(stage.expected for stage in memory))
        return expected, expected > self._limits.memory_limit_bytes


def _frees_memory(plan: Plan) -> bool:
    layout = plan.layout
    recomputes = any(level != Recomputed(vision=0, language=0) for stage in plan.stages for level in stage.recomputed)
    return recomputes or layout.pipeline > 1 or layout.shards_gradients


def _ways(layout: Layout, layers: int) -> Iterator[tuple[Change, list[Layout]]]:
    """Yield the layouts of each way to fit the memory on as many ranks."""
    alone = _alone(layout)
    ranks = alone.data
    yield "recompute-alone", [alone]
    yield "shards", [replace(alone, zero=3)] if ranks > 1 else []
    pipelines = [count for count in range(2, min(ranks, layers) + 1) if ranks % count == 0]
    stages = (replace(alone, pipeline=count, data=ranks // count, zero_bubble=True) for count in pipelines)
    yield "zero-bubble", [replace(each, zero=1 if each.data > 1 else 0) for each in stages]


def _alone(layout: Layout) -> Layout:
    """Return data parallelism alone on as many ranks."""
    ranks = layout.pipeline * layout.data
    return Layout(pipeline=1, data=ranks, zero=1 if ranks > 1 else 0)


def repacked(usual: Plan, packing: Packing) -> Plan:
    """Return the fastest baseline with other packs; every level recomputes as the baseline's first level does."""
    stages = (stage.recomputing(stage.recomputed[:1] * len(packing.degrees)) for stage in usual.stages)
    return replace(usual, packing=packing, stages=tuple(stages))


def resplit(usual: Plan, winner: Plan) -> Plan:
    """Return the baseline with the winner's layout and boundaries, and as large a share of layers recomputed.

    Its stages defer as many weight gradients as those of the winner.
    """
    shares = [_shares(usual, level) for level in range(len(usual.packing.degrees))]
    counts = layer_counts(winner.boundaries, sum(stage.vision for stage in usual.stages))
    stages = (
        Stage(vision=vision, language=language, most_deferred=stage.most_deferred).recomputing(
            [
                Recomputed(vision=round(of_vision * vision), language=round(of_language * language))
                for of_vision, of_language in shares
            ]
        )
        for (vision, language), stage in zip(counts, winner.stages, strict=True)
    )
    return replace(usual, layout=winner.layout, stages=tuple(stages))


def _shares(plan: Plan, level: int) -> tuple[float, float]:
    """Return the shares of vision and of language layers that are recomputed for packs of a level."""
    stages = [(stage, stage.recomputed[level]) for stage in plan.stages]
    vision = _share((recomputed.vision, stage.vision) for stage, recomputed in stages)
    return vision, _share((recomputed.language, stage.language) for stage, recomputed in stages)


def _share(recomputed_of: Iterable[tuple[int, int]]) -> float:
    recomputed, layers = map(sum, zip(*recomputed_of, strict=True))
    return recomputed / max(layers, 1)
