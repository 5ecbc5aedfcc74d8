"""Levels of packs on samples of mixed lengths, and on samples of like lengths, by analytic costs: nothing is measured.

A part of `python -m benchmarks.parallel`. Of each model, data and number of devices the plan that a search predicts to
be fastest is compared with HBP's recipe, and with packs of one level as long as the longest sample (ISF). The search
compares plans on its excerpt; all figures are those of the whole set. The same packs are also compared as HBP ran its
own: with ZeRO 3, so that ranks wait for each other in every row.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from autotune.dimensions.usual import layouts
from autotune.epoch_balance import balance, dist_ratios, step_sums
from autotune.events import Event, TrialEnded
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.search.hbp import hbp_plan
from autotune.search.sampling.advisor import Advisor
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.space.space import Space
from benchmarks.cases.lengths import index_of
from benchmarks.cases.mixed import DATA, MEMORY, Mixed
from benchmarks.cases.solver import INTERN_LM2_2B, INTERN_LM2_7B, INTERN_VIT_300M
from benchmarks.output.result import Check, at_least, at_most, show
from benchmarks.search import search
from trials import wire
from trials.data.epoch import Epoch
from trials.plan import Layout, Packed, Packing, Padded, Plan

MODELS = {"300M + 2B": (INTERN_VIT_300M, INTERN_LM2_2B), "300M + 7B": (INTERN_VIT_300M, INTERN_LM2_7B)}
DEVICES = (8, 16, 32)
ABR, COMMUNICATION, DIST, OF_ISF, OF_HBP = 0.002, 0.17, 0.002, 1.4, 1.05
MOST_LOST = 1
_NEARLY = 1.05
"""Of pipeline degrees within this factor of the best, the search's climbs to better plans are followed."""


def rows() -> Iterator[dict[str, Any]]:
    for data, model, devices in product(DATA, MODELS, DEVICES):
        began = time.monotonic()
        row = _row(_workload(model, data, devices, MEMORY))
        show(f"{row['case']}: {time.monotonic() - began:.0f} s")
        yield row
    for room in (0.1, 0.4, 0.9):
        yield _lost(room)


def _workload(model: str, data: str, devices: int, memory: int | None, room: float = 0.9) -> Mixed:
    vision, language = MODELS[model]
    return Mixed(
        name=f"{model}, {data}, {devices} devices",
        vision=vision,
        language=language,
        tensor=1,
        data=data,
        devices=devices,
        room=room,
        seed=1,
        memory=memory,
    )


def _row(workload: Mixed) -> dict[str, Any]:
    compared = workload.calibrated.profiled
    space = workload.space(compared)
    plans = _predicted(workload, space)
    found = next(filter(workload.may_fit, plans))
    alone = (plan for plan in plans if plan.packing.degrees == (1,))
    single = next(filter(workload.may_fit, alone), None)
    sharing = (_communication(compared.sizes(plan.packing, plan.layout).epoch) for plan in plans)
    rarely = (plan for plan, share in zip(plans, sharing, strict=True) if share <= COMMUNICATION)
    least = next(filter(workload.may_fit, rarely), None)
    hbp = hbp_plan(workload.workload, compared, workload.solver)
    assert hbp is not None
    assert not isinstance(hbp.packing, Padded)
    longest = hbp.packing.levels[-1]
    isf = workload.solver.fit_fewest(longest, hbp.layout, workload.solver.forward_boundaries(longest, hbp.layout))
    every = layouts(workload.shape, workload.devices)
    row = {
        "case": workload.name,
        "found": _described(workload, found),
        "one level on single ranks": single and _described(workload, single),
        "communication within the bar": least and _described(workload, least),
        "least communication ratio": _least_communication(workload, every, recompute=True),
        "without recomputation in its layout": _least_communication(workload, [found.layout], recompute=False),
        "HBP's recipe": _described(workload, hbp),
        "ISF": isf and _described(workload, isf),
        "ISF, unmatched": isf and _described(replace(workload, matched=False), isf),
    }
    return row | {"published": _published(workload, found.packing, hbp.packing, longest)}


def _predicted(workload: Mixed, space: Space) -> list[Plan]:
    """Return the starts of a search, and what it finds from the best of them before any trial, fastest first."""
    limits, settings = workload.limits(workload.memory_limit_bytes), workload.prepared().job.search
    found = Advisor(space, workload.calibrated, limits, settings).predicted(_NEARLY)
    plans = [*dict.fromkeys((*found, *space.starts))]
    seconds = workload.calibrated.plans_epoch_seconds(plans)
    return [plans[number] for number in np.argsort(seconds, kind="stable")]


def _published(workload: Mixed, found: Packing, hbp: Packing, isf: Packed) -> dict[str, Any]:
    """Return the packs as HBP ran its own, with the fewest recomputed layers; rows of ISF are of any packs."""
    matched = replace(workload, published=True)
    layout = Layout(pipeline=1, data=workload.devices, zero=3)
    several = {"found": (matched, found), "HBP's recipe": (matched, hbp)}
    several["ISF"] = replace(matched, matched=False), isf
    plans = {
        name: (each, each.solver.fit_fewest(packing, layout, each.solver.forward_boundaries(packing, layout)))
        for name, (each, packing) in several.items()
    }
    return {name: plan and _described(each, plan) for name, (each, plan) in plans.items()}


def _communication(epoch: Epoch) -> float:
    """Return the share of tokens in packs that ranks share (HBP)."""
    tokens = epoch.pack_sizes().tokens
    return float(tokens[epoch.degrees > 1].sum() / tokens.sum())


def _least_communication(workload: Mixed, several: Sequence[Layout], *, recompute: bool) -> float:
    """Return the share of tokens in samples that fit on no single rank of the layouts."""
    index, limits = workload.index, workload.limits(workload.memory_limit_bytes)
    by_length = np.argsort(index.text_tokens, kind="stable")

    def fits(sample: int) -> bool:
        units, tokens = (
            np.full(workload.devices, column[sample]) for column in (index.vision_units, index.text_tokens)
        )
        alike = index_of(units, tokens)
        predictor = Predictor(workload.costs, lambda *packs: workload.epoch_of(alike, *packs), 2)
        solver = Solver(predictor, limits)
        leanest = (solver.leanest(Padded(samples=1), layout, recompute=recompute) for layout in several)
        return any(solver.fullest(plan)[0] <= limits.usable_bytes for plan in leanest)

    fitting, too_long = 0, len(by_length)
    while fitting < too_long:
        middle = (fitting + too_long) // 2
        if fits(int(by_length[middle])):
            fitting = middle + 1
        else:
            too_long = middle
    return float(index.text_tokens[by_length[fitting:]].sum() / index.text_tokens.sum())


def _described(workload: Mixed, plan: Plan) -> dict[str, Any]:
    prediction = workload.predictor.predict(plan)
    sizes = workload.predictor.sizes(plan.packing, plan.layout)
    epoch = sizes.epoch
    found = balance(epoch, workload.weights)
    squares = (epoch.pack_sizes().squares / epoch.degrees)[epoch.assignment]
    update = workload.predictor.times.update_parts(plan.layout, Parts.of_levels(plan)[0], sizes)
    return {
        "plan": wire.to_document(plan),
        "epoch_seconds": prediction.epoch_seconds,
        "batch_deviation": prediction.batch_deviation,
        "attention_balance_ratio": found.attention_balance_ratio,
        "attention_balance_ratio_of_steps": float(dist_ratios(step_sums(epoch, squares)).mean()),
        "dist_ratio_language": found.dist_ratio_language,
        "dist_ratio_vision": found.dist_ratio_vision if workload.workload.data.vision_units else 0.0,
        "communication_ratio": _communication(epoch),
        "share_of_reduction": float(update.reduction.max()) * epoch.steps / prediction.epoch_seconds,
        "shares": {name: seconds / prediction.epoch_seconds for name, seconds in prediction.breakdown.totals.items()},
    }


def _speed(row: dict[str, Any], over: str) -> float:
    """Return how many times as fast the found plan is as another one; 0 where that fits nowhere."""
    return row[over]["epoch_seconds"] / row["found"]["epoch_seconds"] if row[over] else 0.0


def _lost(room: float) -> dict[str, Any]:
    """Return a search on samples of like lengths on 4 ranks, and how many trials it spent on levels or shared packs."""
    workload, heard, said = _workload("300M + 2B", "tiles up to 5", 4, None, room), list[Event](), list[str]()
    found = search(workload, 24, heard=heard.append)
    solver = Solver(workload.predictor, workload.limits(workload.memory_limit_bytes))
    feasible_space(workload.workload, solver, remedy="", show=said.append)
    ran = [event.trial.plan for event in heard if isinstance(event, TrialEnded) and not event.is_known]
    return {
        "case": f"samples of like lengths on 4 ranks, room {room:.0%}",
        "said": said,
        "trials": len(ran),
        "trials_of_levels_or_shared_packs": sum(plan.packing.degrees != (1,) for plan in ran),
        "winner": wire.to_document(found.plan),
    }


def checks(found: list[dict[str, Any]]) -> list[Check]:
    mixed, alike = ([row for row in found if ("found" in row) is is_mixed] for is_mixed in (True, False))
    plans = [row["found"] for row in mixed]
    return [
        at_most("attention balance ratio", [plan["attention_balance_ratio"] for plan in plans], ABR),
        at_most("communication ratio", [plan["communication_ratio"] for plan in plans], COMMUNICATION),
        at_most("dist ratio of text tokens", [plan["dist_ratio_language"] for plan in plans], DIST),
        at_least("speed over ISF with one level", [_speed(row, "ISF, unmatched") for row in mixed], OF_ISF),
        at_least("speed over HBP's recipe", [_speed(row, "HBP's recipe") for row in mixed], OF_HBP),
        at_most(
            "trials lost where levels cannot help",
            [row["trials_of_levels_or_shared_packs"] for row in alike],
            MOST_LOST,
        ),
    ]
