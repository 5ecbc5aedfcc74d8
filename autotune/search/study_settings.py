"""The settings that are stored with a study, by which a later search finds the one to go on with."""

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from trials.plan import Plan

if TYPE_CHECKING:
    from storage.records import StudyRecord
    from trials.data.index import DatasetIndex
    from trials.job import SearchSection, TrainingSection

_log = logging.getLogger(__name__)

FRESH = "fresh"
"""Key of whether the study was asked to know nothing of earlier ones."""
TRAINER = "trainer"
"""Key of the trainer whose limits the search kept; None for a search without."""
MODEL = "model"
"""Key of the model's folder or hub id in the job that began the study; one of the same sizes may continue it."""
TRAINING = "training"
"""Key of the settings of the training by which packs are arranged in steps."""
LOADING_WORKERS = "loading_workers"
"""Key of the loading processes of each rank."""
PACKS = "packs"
"""Key of what packs depend on besides the lengths of samples and the settings, as `packs_of` returns it."""
_OF_STEPS = {"batch_tolerance", "step_variance"}
_WARMUP, _TIMED = "warmup_steps", "timed_steps"
_OF_AN_AGENT = ("parallel", "workers", "trial_timeout", MODEL)
"""Settings in which agents of one search may differ."""


def packs_of(index: "DatasetIndex") -> str:
    """Return what tells apart packs of samples of the same lengths: their files, and the version that arranges them."""
    from trials.data.steps.arrangement import ARRANGEMENT_VERSION  # noqa: PLC0415 - look-ups do without numpy

    return f"{index.steps_digest}-{ARRANGEMENT_VERSION}"


def study_settings(
    search: "SearchSection",
    training: "TrainingSection",
    current_plan: Plan | None,
    queued: Iterable[Plan],
    model: str,
    *,
    fresh: bool,
    trainer: str | None = None,
    loading_workers: int = 0,
    packs: str | None = None,
) -> dict[str, object]:
    """Return the settings of a new study. Plans that the job gives are known by their ids, not by their files."""
    return {
        **search.model_dump(mode="json"),
        TRAINING: training.model_dump(include=_OF_STEPS),
        LOADING_WORKERS: loading_workers,
        PACKS: packs,
        "current_plan": current_plan and current_plan.id,
        "queue": [plan.id for plan in queued],
        TRAINER: trainer,
        MODEL: model,
        FRESH: fresh,
    }


def is_same_search(stored: Mapping[str, object], settings: Mapping[str, object]) -> bool:
    """Return whether a study with the `stored` settings is the search of these settings."""
    from trials.job import SpaceSection  # noqa: PLC0415 - look-ups, which need a name from here, do without jobs

    # A version before may have stored fewer axes of the space, which then had their defaults.
    space = SpaceSection.model_validate(stored.get("space", {})).model_dump(mode="json")
    known = {**stored, "space": space}
    return {key for key, value in settings.items() if known.get(key) != value} <= {FRESH, PACKS, *_OF_AN_AGENT}


def goes_on(study: "StudyRecord", settings: Mapping[str, object], seed: int) -> bool:
    """Return whether a study is the search of these settings, and may be joined where it is unfinished.

    Steps of its trials would have other packs than further ones of another seed, or of other files.
    """
    has_same_packs = study.seed == seed and _may_have(study, settings.get(PACKS))
    return is_same_search(study.settings, settings) and (study.finished is not None or has_same_packs)


def answers(one: "StudyRecord", other: "StudyRecord") -> bool:
    """Return whether the trials of one study need no second run in the other, of the same workload."""
    of_one, of_other = (
        (each.seed, *map(each.settings.get, (TRAINING, LOADING_WORKERS, _WARMUP))) for each in (one, other)
    )
    return of_one == of_other and _may_have(one, other.settings.get(PACKS))


def teaches(study: "StudyRecord", training: "TrainingSection", loading_workers: int, packs: str) -> bool:
    """Return whether the trials of a study apply to a training with this number of loading processes per rank.

    They do if their steps had the same packs. All numbers of processes above 0 have the same predictions.
    """
    loads_alike = bool(study.settings.get(LOADING_WORKERS)) == bool(loading_workers)
    return loads_alike and has_packs(study, training, packs)


def has_packs(study: "StudyRecord", training: "TrainingSection", packs: str) -> bool:
    """Return whether the steps of a study's trials had the packs of a training."""
    then = training_of(study.settings)
    return (
        study.seed == training.seed
        and then.model_dump(include=_OF_STEPS) == training.model_dump(include=_OF_STEPS)
        and _may_have(study, packs)
    )


def _may_have(study: "StudyRecord", packs: object) -> bool:
    """Return whether the trials of a study may have had these packs: an earlier version did not store them."""
    stored = study.settings.get(PACKS)
    return stored is None or packs is None or stored == packs


def search_of(settings: Mapping[str, object], now: "SearchSection") -> "SearchSection":
    """Return the numbers of steps of the trials of a study; where none can be read, those of now."""
    from pydantic import ValidationError  # noqa: PLC0415 - as above

    known = {name: settings[name] for name in (_WARMUP, _TIMED) if name in settings}
    try:
        return type(now).model_validate({**now.model_dump(include={_WARMUP, _TIMED}), **known})
    except ValidationError as error:
        _log.warning("the study's numbers of steps are left out: %s", error)
        return now


def training_of(settings: Mapping[str, object]) -> "TrainingSection":
    """Return the settings by which the packs of a study were arranged; where none can be read, the defaults."""
    from pydantic import ValidationError  # noqa: PLC0415 - as above

    from trials.job import TrainingSection  # noqa: PLC0415

    try:
        return TrainingSection.model_validate(settings.get(TRAINING, {}))
    except ValidationError as error:
        _log.warning("the study's settings of the training are left out: %s", error)
        return TrainingSection()
