"""Comparison of searches on simulated machines and on recorded surfaces. Prints one JSON object.

    python -m benchmarks.search [--workloads 50] [--rivals 50] [--processes 2] [--rows FILE]

What is done is kept in a file of rows, and a run that was ended goes on from there.

Each workload of `benchmarks/cases/workloads.py` is a job with its own model, data, devices and memory, on a machine
whose layers differ from their profile by 8 %, whose steps have noise and which drifts. Regret is how much longer an
epoch truly takes under the plan that a search would choose after a number of trials than under the best plan known,
which was found with the machine's own costs. Others are Optuna's samplers and a grid of the solver's plans, in random
order, on the same space with the same trials; they choose the plan that measured fastest.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import InMemoryStorage

from autotune.events import Event, TrialEnded
from autotune.prediction.calibration import CalibrationState
from autotune.search.baselines import baselines
from autotune.search.execution.ledger import ran
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.warm_start import moved
from autotune.search.roles import CONFIRMATION, Role
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.context import SamplerContext
from autotune.search.sampling.proposals import Proposals
from autotune.search.search import Search
from autotune.search.solver.solver import Solver
from benchmarks.cases.workloads import NOISY, SimulatedWorkload, workloads
from benchmarks.output.result import Check, at_least, at_most, finish, show
from benchmarks.output.rows import Task, done_rows
from benchmarks.references.samplers import fastest_fitting, other_search
from benchmarks.surfaces.replay import replayed
from benchmarks.surfaces.surface import RECORDED, Surface, read_surface
from tests.machines.simulated import Behaviour, Observed, SimulatedLedger
from trials.outcome import Failed, OutOfMemory
from trials.plan import Plan

ALL = 50
"""Workloads."""
TRIALS = 12
MANY_TRIALS = 30
OTHERS = ("tpe", "gp", "uniform", "grid")
OTHERS_TRIALS = 40
RECORDED_PLANS = 200
ENOUGH = 0.01
"""Regret that counts as found."""
WRONG = 2.0
"""Factor by which layer costs are planted wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one search came to."""

    workload: SimulatedWorkload
    best_so_far: tuple[float, ...]
    """True seconds of the best plan after each trial that counts; infinite while nothing was measured."""
    plan: Plan
    """The winner."""
    seconds: float
    """True time of an epoch under the winner."""
    confidence: float | None
    is_fastest: bool
    """Whether it truly is, of the plans that it was compared with."""
    is_named: bool
    """Whether the one that truly is fastest of them is the winner or one of its ties."""
    trials: int
    """All of them, repeats included."""
    out_of_memory: int
    """Those that ran out of memory."""
    degrees: tuple[int, ...]
    """Stages of the plans that ran, in order, and of the winner."""
    fastest_tried: float
    """True seconds of the fastest plan that ran."""
    after_the_rest: float | None
    """True seconds of the best plan had the search gone on; None where it spent its budget, or did not go on."""
    state: CalibrationState

    @property
    def regrets(self) -> tuple[float, ...]:
        """Difference from the fastest plan of all after each trial that counts, as a share."""
        return tuple(seconds / self.workload.best_seconds - 1 for seconds in self.best_so_far)


def search(
    workload: SimulatedWorkload,
    trials: int,
    behaviour: Behaviour = NOISY,
    seed: int = 0,
    after: Found | None = None,
    *,
    go_on: bool = False,
    heard: Callable[[Event], object] = lambda _: None,
) -> Found:
    """Run our search; `after` another one, on a workload like this. With `go_on`, spend the trials that it left."""
    launcher = workload.launcher(behaviour, seed)
    prepared = workload.prepared(trials=trials)
    limits = workload.limits(workload.memory_limit_bytes)
    calibrated = CalibratedPredictor(workload.predictor, after.state if after else None)
    space = workload.space(workload.predictor)
    advisor = Advisor(space, calibrated, limits, prepared.job.search)
    ledger = SimulatedLedger(launcher)
    best_so_far: list[float] = []

    def listen(event: Event) -> None:
        heard(event)
        if not isinstance(event, TrialEnded) or event.is_known:
            return
        if ran(event.trial) and event.trial.role not in CONFIRMATION:
            chosen = advisor.best()
            best_so_far.append(launcher.epoch_seconds(chosen) if chosen else math.inf)

    solver = Solver(workload.predictor, limits)
    inherited = after and moved(after.plan, workload.workload, space)
    runner = Runner(prepared, calibrated, launcher, partial(Observed, launcher), launcher.clock)
    ours = Search(
        settings=prepared.job.search,
        ledger=ledger,
        proposals=Proposals(
            InMemoryStorage(), "study", "model", SamplerContext(space=space, advisor=advisor, seed=seed)
        ),
        space=space,
        predictor=calibrated,
        advisor=advisor,
        runners=[runner],
        listener=listen,
        clock=launcher.clock,
        baselines=baselines(workload.workload, workload.predictor, solver, limits, hold_all=False),
        inherited=[inherited] if inherited and space.point(inherited) else [],
    )
    ours.explore()
    standings = ours.confirm()
    winner = standings.winner()
    plan = standings.entries[winner.number].plan
    ran_in_all = len(ledger.trials)
    out_of_memory = sum(
        isinstance(trial.result.outcome, Failed) and isinstance(trial.result.outcome.cause, OutOfMemory)
        for trial in ledger.trials
    )
    degrees = tuple(each.layout.pipeline for each in (*(trial.plan for trial in ledger.trials), plan))
    state, left = calibrated.state, trials - len(best_so_far)
    if go_on and left:
        _go_on(advisor, ledger, runner, left)
    last = advisor.best()
    fastest = min(standings.compared, key=lambda number: launcher.epoch_seconds(standings.entries[number].plan))
    return Found(
        workload=workload,
        best_so_far=tuple(best_so_far),
        plan=plan,
        seconds=launcher.epoch_seconds(plan),
        confidence=winner.confidence,
        is_fastest=fastest == winner.number,
        is_named=fastest in (winner.number, *winner.ties),
        trials=ran_in_all,
        out_of_memory=out_of_memory,
        degrees=degrees,
        fastest_tried=fastest_fitting(workload, launcher),
        after_the_rest=launcher.epoch_seconds(last) if last and go_on and left else None,
        state=state,
    )


def _go_on(advisor: Advisor, ledger: SimulatedLedger, runner: Runner, trials: int) -> None:
    """Run the advisor's next proposals, whatever they are expected to gain."""
    for _ in range(trials):
        proposal = advisor.propose()
        if proposal is None:
            return
        trial = ledger.begin(proposal.plan, Role.SAMPLED, {})
        advisor.learn(ledger.finish(trial, ledger.put(trial, runner.run(proposal.plan))))


def sequential_seconds(workload: SimulatedWorkload) -> float | None:
    """Return the true time of OmniBal's recipe: the fastest, on the machine, of its split's neighbours that fit."""
    launcher = workload.launcher(NOISY, 0)
    limits = workload.limits(workload.memory_limit_bytes)
    solver = Solver(workload.predictor, limits)
    plans = baselines(workload.workload, workload.predictor, solver, limits, hold_all=False)
    fitting = [each.plan for each in plans if each.role == Role.OMNIBAL and workload.fits(each.plan)]
    return min(map(launcher.epoch_seconds, fitting), default=None)


# --- on recorded surfaces ---


def on_surface(case: str) -> dict[str, Any]:
    """Return a row of searches on a surface that begin with a seed: "pages-epyc 3"."""
    name, seed = case.split()
    surface = Surface(*read_surface(RECORDED[name]))
    regrets = {sampler: replayed(sampler, surface, OTHERS_TRIALS, int(seed)) for sampler in ("model", *OTHERS)}
    show(f"surface {case}: {regrets['model'][TRIALS - 1]:.4f}")
    return {
        "surface": name,
        "plans": len(surface.epoch_seconds),
        "error_of_a_plan": surface.error,
        "seed": int(seed),
        "regret_after_12": {sampler: each[TRIALS - 1] for sampler, each in regrets.items()},
        "trials_needed": {sampler: needed(each) for sampler, each in regrets.items()},
    }


# --- what is compared ---


def compare(number: int) -> dict[str, Any]:
    """Return a row with our search and the sequential recipe."""
    workload = list(workloads(ALL))[number]
    found = search(workload, TRIALS)
    sequential = sequential_seconds(workload)
    show(f"{workload.name}: {found.regrets[-1]:.4f}")
    return {
        "workload": workload.name,
        "regrets": found.regrets,
        "winner_regret": found.seconds / workload.best_seconds - 1,
        "confidence": found.confidence,
        "is_fastest": found.is_fastest,
        "is_named": found.is_named,
        "trials_in_all": found.trials,
        "trials_needed": {"model": needed(found.regrets)},
        "gain_on_sequential": sequential / found.seconds if sequential else None,
    }


def rival(number: int) -> dict[str, Any]:
    """Return a row with the other samplers on the same workload."""
    workload = list(workloads(ALL))[number]
    searches = {name: other_search(workload, name, OTHERS_TRIALS) for name in OTHERS}
    best = workload.best_seconds
    regrets = {name: [seconds / best - 1 for seconds in found.best_so_far] for name, found in searches.items()}
    show(
        f"others on {workload.name}: {[round(each[TRIALS - 1], 4) for each in regrets.values() if len(each) >= TRIALS]}"
    )
    return {
        "workload": workload.name,
        "trials_needed": {name: needed(each) for name, each in regrets.items()},
        "regret_after_12": {name: each[:TRIALS][-1] for name, each in regrets.items()},
    }


def needed(regrets: Sequence[float]) -> int | None:
    """Return the trials until the regret stays at ENOUGH or below; None when it never does."""
    above = [number for number, regret in enumerate(regrets, 1) if regret > ENOUGH]
    last = above[-1] if above else 0
    return last + 1 if last < len(regrets) else None


def planted(number: int) -> dict[str, Any]:
    """Search on a machine whose layers take twice or half of what the profile says, and 20 % more or less memory."""
    workload = list(workloads(ALL))[number]
    random = np.random.default_rng(number)
    times = [WRONG ** float(random.choice((-1, 1))) for _ in range(3)]
    kept = float(random.choice((0.8, 1.2)))
    wrong = replace(workload, wrong=(*times, times[0], 1.0, 1.0, 1.0, 1.0, kept))
    found = search(wrong, MANY_TRIALS)
    regret = found.seconds / wrong.best_seconds - 1
    show(f"planted {times} {kept} {wrong.name}: {regret:.4f}")
    return {"workload": wrong.name, "factors": times, "bytes": kept, "regrets": found.regrets, "winner_regret": regret}


def second(number: int) -> dict[str, Any]:
    """Search a job that is changed a little: a quarter more data and batch, other samples, a further language layer."""
    workload = list(workloads(ALL))[number]
    language = replace(workload.language, layers=workload.language.layers + 1)
    changed = replace(workload, language=language, growth=1.25, memory=workload.memory_limit_bytes)
    first = search(workload, TRIALS)
    cold, warm = search(changed, TRIALS, seed=1), search(changed, TRIALS, seed=1, after=first)
    show(f"second {changed.name}: {needed(cold.regrets)}, after the first {needed(warm.regrets)}")
    return {
        "workload": changed.name,
        "trials_needed_alone": needed(cold.regrets),
        "trials_needed_after_the_first": needed(warm.regrets),
        "regrets": [cold.regrets, warm.regrets],
    }


def repeated(number: int) -> dict[str, Any]:
    """Run ten searches of one job on a noisy machine, each at another time."""
    workload = list(workloads(ALL))[number]
    noisy = replace(NOISY, noise=0.05, drift=0.10)
    seconds = [search(workload, TRIALS, noisy, seed).seconds for seed in range(10)]
    best = min(seconds)
    show(f"repeated {workload.name}: {[round(each / best - 1, 4) for each in seconds]}")
    return {"workload": workload.name, "above_best": [each / best - 1 for each in seconds]}


def main() -> None:
    arguments = _arguments()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    few = range(min(10, arguments.workloads))
    tasks: list[tuple[Task, int | str]] = [
        *((compare, number) for number in range(arguments.workloads)),
        *((planted, number) for number in few),
        *((repeated, number) for number in list(few)[:3]),
        *((second, number) for number in few),
        *((on_surface, f"{name} {seed}") for name in RECORDED for seed in range(arguments.seeds)),
        *((rival, number) for number in range(arguments.rivals)),
    ]
    rows = done_rows(tasks, arguments.rows, arguments.processes)
    compared, rivals, wrong, again, seconds, recorded = (
        [row for row in rows if row["task"] == task.__name__]
        for task in (compare, rival, planted, repeated, second, on_surface)
    )
    of_surfaces = {name: [row for row in recorded if row["surface"] == name] for name in RECORDED}
    on_surfaces = [check for name, rows in of_surfaces.items() for check in _surface_checks(name, rows)]
    finish(rows, [*_regret_checks(compared, rivals), *on_surfaces, *_other_checks(wrong, seconds, again)])


def _regret_checks(compared: list[dict[str, Any]], rivals: list[dict[str, Any]]) -> list[Check]:
    last = [row["regrets"][-1] for row in compared]
    gains = [row["gain_on_sequential"] for row in compared if row["gain_on_sequential"]]
    named = [row["is_named"] for row in compared]
    both = [
        {"trials_needed": {**ours["trials_needed"], **others["trials_needed"]}}
        for ours, others in zip(compared, rivals, strict=False)
    ]
    return [
        at_most("median regret after 12 trials", [float(np.median(last))], 0.01),
        at_most("regret after 12 trials, 90th percentile", [float(np.quantile(last, 0.9))], 0.03),
        at_least("trials of the best other sampler over ours, medians, to stay within 1 %", [_advantage(both)], 5),
        at_least("least gain on the sequential recipe", gains, 0.985),
        at_least("the fastest of the compared plans is named, share", [float(np.mean(named))], 0.9),
    ]


def _surface_checks(name: str, recorded: list[dict[str, Any]]) -> list[Check]:
    last = [row["regret_after_12"]["model"] for row in recorded]
    return [
        at_least(f"plans of {name}", [row["plans"] for row in recorded], RECORDED_PLANS),
        at_most(f"median regret after 12 trials, {name}", [float(np.median(last))], 0.01),
        at_most(f"regret after 12 trials, 90th percentile, {name}", [float(np.quantile(last, 0.9))], 0.03),
        at_least(f"trials of the best other sampler over ours, {name}", [_advantage(recorded)], 5),
    ]


def _advantage(rows: list[dict[str, Any]]) -> float:
    """Return the median of the trials that the best other sampler needs, over ours."""
    medians = {
        name: float(np.median([row["trials_needed"][name] or OTHERS_TRIALS + 1 for row in rows]))
        for name in ("model", *OTHERS)
    }
    return min(medians[name] for name in OTHERS) / medians["model"]


def _other_checks(
    wrong: list[dict[str, Any]], seconds: list[dict[str, Any]], again: list[dict[str, Any]]
) -> list[Check]:
    alone, after = (
        float(np.median([row[f"trials_needed_{which}"] or TRIALS + 1 for row in seconds]))
        for which in ("alone", "after_the_first")
    )
    close = [sum(each <= 0.02 for each in row["above_best"]) for row in again]
    return [
        at_most("regret after 30 trials with a wrong profile", [row["winner_regret"] for row in wrong], 0.03),
        at_most("trials of a second search over those of one alone, medians", [after / alone], 0.5),
        at_least("of 10 repeated searches, winners within 2 % of each other", close, 9),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=ALL)
    parser.add_argument("--rivals", type=int, default=ALL, help="workloads that other samplers search too")
    parser.add_argument("--rows", type=Path, default=Path("search-rows.jsonl"), help="what is done; goes on from there")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=10, help="searches on each recorded surface")
    return parser.parse_args()


if __name__ == "__main__":
    main()
