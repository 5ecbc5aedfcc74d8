"""The commands that only look things up: plans and show."""

from dataclasses import replace

from autotune import report
from autotune.cli.context import Options
from autotune.errors import HardwareError
from autotune.hardware import probe_hardware, software
from storage.records import BestPlan, FinishedTrial
from storage.store import open_store
from storage.validity import Validity, Verdict, validity
from trials import wire
from trials.job import HardwareSection


def list_plans(options: Options, *, here: bool, hardware: str | None, model: str | None, top: int | None) -> None:
    with open_store(options.database_url()) as store:
        known = store.best_plans(hardware_name=hardware, model_name=model)
    found = [(best, holds_here(best)) for best in known]
    if here:
        found = [(best, holds) for best, holds in found if holds.verdict is not Verdict.INVALID]
    found = found[:top]
    document = {"plans": [{**report.best_document(best), "validity": wire.to_document(holds)} for best, holds in found]}
    nothing = "No plan is known" + (" for this hardware" if here else "") + "; run `autotune tune JOB`."
    options.give(document, lambda: report.plans_text(found) if found else nothing)


def show_plan(options: Options, plan: str) -> None:
    with open_store(options.database_url()) as store:
        best = store.find_plan(plan)
        answers = store.answers(best.workload.fingerprint)
        launches = store.launches(best.plan.id)
    trials = [trial for trial in answers if isinstance(trial, FinishedTrial)]
    holds = holds_here(best)
    document = {
        **report.best_document(best),
        "validity": wire.to_document(holds),
        "trials": [wire.to_document(trial) for trial in trials if trial.plan.id == best.plan.id],
        "launches": [wire.to_document(launch) for launch in launches],
    }
    options.give(document, lambda: report.show_text(best, holds, trials, launches))


def holds_here(best: BestPlan) -> Validity:
    """Compares with this machine and its software; model and data are taken as they were."""
    then = best.workload
    try:
        hardware = probe_hardware(HardwareSection(devices=then.hardware.devices))
    except HardwareError:
        hardware = probe_hardware(HardwareSection())
    return validity(then, replace(then, hardware=hardware, software=software()))
