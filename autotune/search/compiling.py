"""The decision of `training.compile: auto`, by profiles of the layers both ways on the devices of the job."""

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from autotune.errors import NoFeasiblePlan, ProfileError, TrialsKeepFailing
from autotune.events import Listener, Note, start_events, unheard
from autotune.search.compile_setting import (
    AUTO,
    MARGIN,
    decisions_of,
    obstacle,
    setting_of,
    steps_of,
    with_compile,
)
from autotune.search.execution.profiling import layer_costs
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.tuner import check_search
from autotune.workbench import Workbench
from autotune.workload import Prepared
from storage.records import CompileDecision
from trials.costs.coefficients import times
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts
from trials.model.refusals.compiling import check_compiler, missing_tool
from trials.run.pool import WarmPool
from trials.workload import COMPILER


def decided(bench: Workbench, listener: Listener = unheard, *, fresh: bool = False) -> Workbench:
    """Return the workbench of a job that says whether layers are compiled; with `auto` that is decided, and stored.

    A decision for this workload and length of training is not made again, unless `fresh`. Where no profile is stored,
    or `fresh`, the layers are profiled. Raise what `check_search` and `layer_costs` raise, and NoCompiler where another
    agent decided to compile, and this machine cannot.
    """
    prepared = bench.prepared
    if prepared.job.training.compile != AUTO:
        return bench
    check_search(prepared)
    steps = steps_of(prepared.job.training, prepared.workload.data.samples)
    known = any(each.steps == steps for each in decisions_of(bench.store, prepared.workload)) and not fresh
    if not known and obstacle(prepared.job, prepared.workload) is None:
        bench.store.keep_compile_decision(_decide(bench, steps, listener, fresh=fresh), anew=fresh)
    return as_decided(bench, listener)


def as_decided(bench: Workbench, listener: Listener = unheard) -> Workbench:
    """Return the workbench with what is decided, for work that measures nothing; layers stay as they are before.

    Raise NoCompiler like `decided`.
    """
    prepared = bench.prepared
    if prepared.job.training.compile != AUTO:
        return bench
    setting = setting_of(bench.store, prepared.job, prepared.workload)
    listener(Note(text=setting.text))
    if setting.compiled:
        check_compiler(prepared.workload.hardware.accelerator)
    return replace(bench, prepared=_with_layers(prepared, compiled=setting.compiled))


def _with_layers(prepared: Prepared, *, compiled: bool) -> Prepared:
    return replace(
        prepared,
        job=with_compile(prepared.job, compiled=compiled),
        workload=prepared.workload.with_layers(compiled=compiled),
    )


def _decide(bench: Workbench, steps: int, listener: Listener, *, fresh: bool) -> CompileDecision:
    work = bench.prepared.workload
    if (missing := missing_tool(work.hardware.accelerator)) is not None:
        compiles, reason = False, f"compiling needs {missing}: not compiled"
    else:
        compiles, reason = _weighed(bench, steps, listener, fresh=fresh)
    return CompileDecision(
        workload_fingerprint=bench.store.add_workload(work),
        steps=steps,
        compiler=COMPILER if compiles else None,
        reason=reason,
        decided=datetime.now(UTC),
    )


def _weighed(bench: Workbench, steps: int, listener: Listener, *, fresh: bool) -> tuple[bool, str]:
    """Return whether to compile, and why, by profiles of the layers both ways."""
    prepared = bench.prepared
    data = prepared.workload.data
    plain = _profile(bench, listener, compiled=False, fresh=fresh)
    try:
        compiled = _profile(bench, listener, compiled=True, fresh=fresh)
    except (TrialsKeepFailing, ProfileError) as error:
        return False, f"compiled layers cannot be profiled ({error}): not compiled"
    plain_seconds = _epoch_seconds(prepared, plain)
    compiled_seconds = _epoch_seconds(prepared, only_compiled(plain, compiled))
    if compiled_seconds is None:
        return False, "no plan that can be compiled fits the memory: not compiled"
    if plain_seconds is None:
        return True, "only plans with compiled layers, which keep less, fit the memory: compiled"
    assert compiled.compile_seconds is not None, "the profile is of compiled layers"
    steps_of_epoch = math.ceil(data.samples / prepared.workload.global_batch_samples)
    trade = CompileTrade(
        plain_step_seconds=plain_seconds / steps_of_epoch,
        compiled_step_seconds=compiled_seconds / steps_of_epoch,
        error=max(spread for *_, spread in compiled.compiled_shares),
        compile_seconds=compiled.compile_seconds,
        steps=steps,
    )
    return trade.pays, trade.reason


def _profile(bench: Workbench, listener: Listener, *, compiled: bool, fresh: bool) -> LayerCosts:
    prepared, logs = _with_layers(bench.prepared, compiled=compiled), bench.folder / "ranks" / "profile"
    bench.store.add_workload(prepared.workload)
    launcher = bench.site.launcher(logs, prepared.workload.hardware.devices)
    # Ranks of its own: those that have compiled hold the compiler.
    with WarmPool(launcher, on_start=start_events(listener)) as pool:
        return layer_costs(prepared, bench.store, pool, logs, listener, fresh=fresh)


def _epoch_seconds(prepared: Prepared, costs: LayerCosts) -> float | None:
    """Return the predicted time of an epoch of the best plan; None where none fits the memory."""
    workload = prepared.workload
    predictor = CalibratedPredictor.of_job(
        prepared.job,
        prepared.index,
        prepared.weights,
        costs=costs.with_workers(prepared.job.data.workers or 0),
        element_bytes=workload.model.element_bytes,
    )
    solver = Solver(predictor.profiled, Limits.of(workload))
    try:
        space = feasible_space(workload, solver, remedy="", wanted=prepared.job.search.space)
    except NoFeasiblePlan:
        return None
    return min(predictor.plans_epoch_seconds(space.starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTrade:
    """Steps of the best plan with layers as they are and with compiled ones, and the cost of compiling."""

    plain_step_seconds: float
    compiled_step_seconds: float
    error: float
    """Share of the time by which the layers may be less fast than they were timed."""
    compile_seconds: float
    """Of the slowest rank, for layers of all kinds: all ranks wait for it."""
    steps: int
    """Of the whole training."""

    @property
    def repaid_steps(self) -> int | None:
        """Steps in which compiling is repaid `MARGIN` times by what is clearly gained; None where nothing is."""
        gain = (1 - self.error) * self.plain_step_seconds - self.compiled_step_seconds
        return math.ceil(MARGIN * self.compile_seconds / gain) if gain > 0 else None

    @property
    def pays(self) -> bool:
        return self.repaid_steps is not None and self.repaid_steps <= self.steps

    @property
    def reason(self) -> str:
        """One line with the figures."""
        ratio = self.compiled_step_seconds / self.plain_step_seconds
        what = f"steps with compiled layers take {ratio:.2f} of the time, known to {self.error:.2f}"
        if self.repaid_steps is None:
            return f"{what}, which is no clear gain: not compiled"
        return (
            f"{what}; compiling takes {self.compile_seconds:.0f} s, repaid {MARGIN} times after "
            f"{self.repaid_steps:,} steps; the training has {self.steps:,}: {'' if self.pays else 'not '}compiled"
        )


def only_compiled(plain: LayerCosts, compiled: LayerCosts) -> LayerCosts:
    """Return the plain costs with layers that take their share of the time, and keep what compiled ones keep.

    All else, such as exchanges, was timed for both by itself: its noise is no gain.
    """
    shares = {kind: share for kind, share, _ in compiled.compiled_shares}
    layers = tuple((kind, _scaled(cost, compiled[kind], shares.get(kind))) for kind, cost in plain.layers)
    return replace(plain, layers=layers, compile_seconds=compiled.compile_seconds)


def _scaled(plain: LayerCost, compiled: LayerCost, share: float | None) -> LayerCost:
    if share is None:
        return plain
    return replace(
        compiled,
        forward_seconds=times(plain.forward_seconds, share),
        backward_seconds=times(plain.backward_seconds, share),
        recompute_seconds=times(plain.recompute_seconds, share),
        curve_sizes=plain.curve_sizes,
        curve=plain.curve,
    )
