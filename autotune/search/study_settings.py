"""The settings that are stored with a study, by which a later search finds the one to go on with."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trials.plan import Plan

if TYPE_CHECKING:
    from trials.job import SearchSection

FRESH = "fresh"
"""Key of whether the study was asked to know nothing of earlier ones."""
MODEL = "model"
"""Key of the model's folder or hub id in the job that began the study; one of the same sizes may continue it."""
_OF_AN_AGENT = ("parallel", "workers", "trial_timeout", MODEL)
"""Settings in which agents of one search may differ."""


def study_settings(search: "SearchSection", current_plan: Plan | None, model: str, *, fresh: bool) -> dict[str, object]:
    """Return the settings of a new study. The current plan is known by its id, not by its file."""
    return {
        **search.model_dump(mode="json"),
        "current_plan": current_plan and current_plan.id,
        MODEL: model,
        FRESH: fresh,
    }


def is_same_search(stored: Mapping[str, object], settings: Mapping[str, object]) -> bool:
    """Return whether a study with the `stored` settings is the search of these settings."""
    from trials.job import SpaceSection  # noqa: PLC0415 - look-ups, which need a name from here, do without jobs

    # An earlier version stored fewer axes of the space, and the current plan by another name.
    space = SpaceSection.model_validate(stored.get("space", {})).model_dump(mode="json")
    known = {"current_plan": stored.get("present"), **stored, "space": space}
    return {key for key, value in settings.items() if known.get(key) != value} <= {FRESH, *_OF_AN_AGENT}
