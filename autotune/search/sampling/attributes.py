"""User attributes of Optuna's study and trials, which its dashboard shows."""

from collections.abc import Mapping
from typing import Any

from autotune.plan_text import plan_text
from storage.records import BestPlan, FinishedTrial
from trials import wire
from trials.outcome import Completed, Failed, Outcome, Rejected
from trials.workload import Workload

TRIAL_ID, AGENT_ID, ROLE = "trial_id", "agent_id", "role"
_MEBI = 1 << 20


def trial_attributes(record: FinishedTrial) -> Mapping[str, Any]:
    """Describe a stored trial: its plan, what it measured or why it failed, and what disturbed it.

    There are few of them, because Optuna takes a transaction for each.
    """
    result = record.result
    found: dict[str, Any] = {
        TRIAL_ID: record.id,
        ROLE: record.role,
        "plan": record.plan.id,
        "outcome": _kind(result.outcome),
    }
    match result.outcome:
        case Completed(measurement=measurement):
            found["measured_samples_per_second"] = measurement.measured_samples_per_second
            found["peak_mib"] = measurement.peak_bytes / _MEBI
        case Rejected(reason=reason):
            found["cause"] = reason
        case Failed(cause=cause):
            found["cause"] = str(cause)
    if result.disturbance is not None:
        found["disturbed"] = result.disturbance
    return found


def _kind(outcome: Outcome) -> str:
    match outcome:
        case Completed(shortened=True):
            return "ended early"
        case Failed(cause=cause):
            return cause.kind
        case _:
            return outcome.kind


def study_attributes(workload: Workload) -> Mapping[str, Any]:
    """Describe what a study tunes, and on which machine."""
    return {
        "model": workload.model.name,
        "hardware": str(workload.hardware),
        "samples": workload.data.samples,
        "global_batch_samples": workload.global_batch_samples,
        "memory_limit_mib": workload.memory_limit_bytes / _MEBI,
        "software": wire.to_document(workload.software),
        "workload": workload.fingerprint,
    }


def winner_attributes(best: BestPlan) -> Mapping[str, Any]:
    """Describe the winner of a study: its plan, its speed, and its gains over the baselines."""
    return {
        "winner": best.plan.id,
        "winner_text": plan_text(best.plan),
        "winner_estimated_samples_per_second": best.estimated_samples_per_second,
        "winner_estimated_samples_per_second_error": best.estimated_samples_per_second_error,
        "winner_gains": {baseline.role: baseline.gain for baseline in best.baselines},
        "winner_probability": best.confidence,
        "winner_ties": list(best.ties),
    }
