"""Where the time of a measured plan goes: its simulation, at the pace at which its ranks were measured.

The parts sum to the measured time: what the simulation does not explain is a part as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from autotune.prediction.chosen_steps import ChosenSteps
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.simulation.attribution import Breakdown, Slowness, attribute_all
from autotune.prediction.simulation.synchronization import Lockstep
from autotune.prediction.sizes import EpochSizes
from autotune.search.learning.calibrated import CalibratedPredictor
from storage.explanation import UNEXPLAINED, Basis, TimePart
from trials.arrays import Floats
from trials.model.cut import cut
from trials.outcome import Measurement
from trials.plan import Plan

_DRAWS = 32
"""Draws of the calibration's factors and of the measurements' noise, which give errors to about an eighth."""
_STEPS = 64
"""Most steps on which errors are estimated."""
_NAMES = tuple(field.name for field in fields(Breakdown))
_BASES: dict[str, Basis] = {
    "ideal": "divided",
    "padding": "divided",
    "recompute": "divided",
    "loading": "simulated",
    "stage_imbalance": "measured",
    "data_imbalance": "simulated",
    "bubble": "simulated",
    "communication": "predicted",
    "optimizer": "measured",
}
_FROM_THE_MODEL: tuple[Basis, ...] = ("simulated", "predicted")
_REST: Basis = "rest"
# Divisor where the simulated parts and the rest are 0, as the numerator then is: any positive number.
_TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ranks:
    """Mean seconds per step of each rank, [data ranks, stages]."""

    work: Floats
    """Forward and backward passes."""
    load: Floats
    optimizer: Floats

    @classmethod
    def mean(cls, several: "Sequence[_Ranks]") -> "_Ranks":
        return cls(**{name: np.mean([getattr(each, name) for each in several], axis=0) for name in cls.__slots__})

    def noisy(self, noise: float, random: np.random.Generator) -> "_Ranks":
        """Return the seconds with independent relative errors."""
        factors = np.exp(noise * random.standard_normal((3, *self.work.shape)))
        return _Ranks(work=self.work * factors[0], load=self.load * factors[1], optimizer=self.optimizer * factors[2])


class MeasuredTime:
    """The parts of an epoch under one plan, from its runs."""

    def __init__(
        self,
        predictor: CalibratedPredictor,
        plan: Plan,
        runs: Sequence[Measurement],
        *,
        epoch_seconds: float,
        epoch_seconds_error: float,
        run_seconds: float,
    ) -> None:
        """`run_seconds` are those of an epoch as the runs alone say; `epoch_seconds` are corrected for drift."""
        self._predictor, self._plan, self._runs = predictor, plan, runs
        self._seconds, self._error = epoch_seconds, epoch_seconds_error
        self._drift = epoch_seconds / run_seconds
        self._sizes = predictor.base.sizes(plan.packing, plan.layout)
        self._of_runs = [ChosenSteps(self._sizes, run.steps) for run in runs]
        self._parts = Parts.of(cut(plan))

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self._sizes.epoch.steps

    @property
    def parts(self) -> tuple[TimePart, ...]:
        """The parts, which sum to the seconds of the epoch."""
        found, errors = self._totals(self._predictor.corrected, self._sizes, self._measured), self._errors
        rest = self._seconds - float(found.sum())
        bases = [self._basis(name) for name in _NAMES]
        # Work is measured, so the rest is waiting or sending that the simulation gets wrong.
        unsure = np.where([basis in _FROM_THE_MODEL for basis in bases], found, 0.0)
        errors = np.hypot(errors, [*(rest * unsure / max(float(unsure.sum()), abs(rest), _TINY)), self._error])
        return tuple(
            TimePart(name=name, seconds=seconds, error=error, basis=basis)
            for name, basis, seconds, error in zip(
                (*_NAMES, UNEXPLAINED), (*bases, _REST), (*found.tolist(), rest), errors.tolist(), strict=True
            )
        )

    def _basis(self, name: str) -> Basis:
        # Waiting for ranks of this stage, or for a weight of another one, may be left in the measured update.
        layout = self._plan.layout
        update = self._predictor.base.times.update_parts(layout, self._parts, self._sizes)
        waits = layout.grid.of_stage > 1 or update.together.any()
        return "predicted" if name == "optimizer" and waits else _BASES[name]

    @cached_property
    def _measured(self) -> _Ranks:
        """What the runs measured, at the speed of `epoch_seconds`."""
        found = _Ranks.mean([_measured(each, self._plan) for each in self._runs])
        drift = self._drift
        return _Ranks(work=found.work * drift, load=found.load * drift, optimizer=found.optimizer * drift)

    @property
    def _errors(self) -> Floats:
        """Standard errors of the seconds of each part, and of their sum."""
        count = min(self.steps, _STEPS)
        some = ChosenSteps(self._sizes, np.unique(np.linspace(0, self.steps - 1, count).round()).astype(int).tolist())
        random = np.random.default_rng(0)
        noise = self._error / self._seconds
        drawn = []
        for predictor in self._predictor.drawn(random, _DRAWS):
            noisy = self._measured.noisy(noise, random)
            found = self._totals(predictor, some, noisy) * self.steps / count
            drawn.append([*found.tolist(), float(found.sum())])
        errors: Floats = np.std(drawn, axis=0)
        return errors

    def _totals(self, predictor: Predictor, sizes: EpochSizes, measured: _Ranks) -> Floats:
        """Return the seconds of each part of these steps, simulated at the measured pace, [parts]."""
        update = predictor.times.update_parts(self._plan.layout, self._parts, sizes)
        if self._plan.layout.grid.of_stage == 1:
            # Stages that begin their reduction together wait for each other in what was measured, and reduce.
            update = replace(update, optimizer=np.where(update.together, update.optimizer, measured.optimizer[0]))
        slowness = self._slowness(predictor, measured)
        seconds = predictor.times.plan_seconds(self._plan, sizes)
        waiting = predictor.times.waiting(self._parts, self._plan.layout, sizes)
        breakdown, _ = attribute_all(sizes.blocks, seconds, update, slowness, waiting)
        return np.array([breakdown.totals[name] for name in _NAMES])

    def _slowness(self, predictor: Predictor, measured: _Ranks) -> Slowness:
        """Return by how much the ranks were slower in their runs than predicted for the same steps."""
        expected = _Ranks.mean([self._expected(predictor, each) for each in self._of_runs])
        packs = self._sizes.epoch.micro_batches
        foreseen = expected.load > 0
        return Slowness(
            work=_ratio(measured.work, expected.work),
            load=_ratio(measured.load, expected.load),
            # Workers load ahead, so that no waiting is predicted; some is measured nevertheless.
            wait=np.where(foreseen, 0.0, measured.load / packs),
        )

    def _expected(self, predictor: Predictor, sizes: ChosenSteps) -> _Ranks:
        """Return the predicted seconds of the ranks in the mean of these steps."""
        seconds = predictor.times.plan_seconds(self._plan, sizes)
        waiting = predictor.times.waiting(self._parts, self._plan.layout, sizes)
        # Measured passes include exchanges, and the waiting for ranks that exchange at each layer.
        passes = seconds.forward + seconds.exchange, seconds.shared_backward
        load, work = np.zeros((2, self._plan.layout.data, self._plan.layout.pipeline))
        for packs in sizes.blocks:
            of_ranks = packs.transpose(0, 2, 1)
            sides = [side[of_ranks].reshape(-1, packs.shape[1], len(work[0])) for side in passes]
            if isinstance(waiting, Lockstep):
                sides = [*waiting.awaited(packs, *sides)]
            work += np.sum(sides, axis=0).reshape(*of_ranks.shape, -1).sum(axis=(0, 2))
            load += seconds.load[of_ranks].sum(axis=(0, 2))
        steps = len(sizes.steps)
        return _Ranks(work=work / steps, load=load / steps, optimizer=np.zeros_like(work))


def usable(run: Measurement, plan: Plan, predictor: CalibratedPredictor) -> bool:
    """Return whether the epoch has the measured steps and ranks; after a change of the seed it may not."""
    steps = predictor.base.sizes(plan.packing, plan.layout).epoch.steps
    return max(run.steps) < steps and len(run.stages) == plan.layout.world_size


def _measured(run: Measurement, plan: Plan) -> _Ranks:
    work, load, optimizer = (np.zeros((plan.layout.data, plan.layout.pipeline)) for _ in range(3))
    for rank in run.stages:
        where = rank.data_rank, rank.stage
        # The mean over tensor ranks, which compute parts of the same packs.
        work[where] += (rank.forward_seconds + rank.backward_seconds) / plan.layout.tensor
        load[where] += rank.load_seconds / plan.layout.tensor
        optimizer[where] += rank.optimizer_seconds / plan.layout.tensor
    return _Ranks(work=work, load=load, optimizer=optimizer)


def _ratio(measured: Floats, expected: Floats) -> Floats:
    """Return measured / expected; 1 where nothing is expected."""
    return np.divide(measured, expected, out=np.ones_like(measured), where=expected > 0)
