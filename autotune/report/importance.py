"""Importances of the parameters of a search, by Optuna."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from storage.records import FinishedTrial

_log = logging.getLogger(__name__)
# A choice: PED-ANOVA compares the best trials with all, which says nothing of two or three.
_LEAST_TRIALS = 4
_CHOICES = (str, int, float, bool, type(None))


def measured_points(trials: Sequence[FinishedTrial]) -> list[tuple[Mapping[str, Any], float]]:
    """Return (parameters, epoch seconds) of the trials with both; all have the same parameters."""
    found = [
        (trial.parameters, trial.result.epoch_seconds)
        for trial in trials
        if trial.result.epoch_seconds is not None and trial.parameters
    ]
    names = {frozenset(point) for point, _ in found}
    plain = all(isinstance(value, _CHOICES) for point, _ in found for value in point.values())
    return found if len(names) == 1 and plain else []


def importances(trials: Sequence[FinishedTrial]) -> Mapping[str, float]:
    """Return the share of each parameter that took several values, the largest first; empty for few trials.

    The study is built anew from stored trials, because Optuna's own tables lack imported ones.
    """
    points = measured_points(trials)
    values = {
        name: list(dict.fromkeys(point[name] for point, _ in points)) for name in (points[0][0] if points else ())
    }
    varied = {name: choices for name, choices in values.items() if len(choices) > 1}
    if len(points) < _LEAST_TRIALS or not varied:
        return {}
    import optuna  # noqa: PLC0415 - it takes a second to import

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    kinds = {name: optuna.distributions.CategoricalDistribution(choices) for name, choices in varied.items()}
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={name: point[name] for name in varied}, distributions=dict(kinds), value=seconds
            )
            for point, seconds in points
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns where few trials differ
        return optuna.importance.get_param_importances(study)
