"""The command that shows two tried plans side by side."""

from contextlib import suppress

from autotune.cli.context import Options
from autotune.results.evidence import trials_behind
from autotune.results.plan_comparison import PlanComparison, comparison_document, comparison_text
from storage.errors import UnknownPlan, UnknownRecord
from storage.reading import read_store
from storage.records import TriedPlan
from storage.store import Store


def compare_plans(options: Options, first: str, second: str) -> None:
    with read_store(options.database_url()) as store:
        one, other = _together(store, first, second)
        ran = {tried.study.id: trials_behind(tried.won, store) for tried in (one, other) if tried.won}
    compared = PlanComparison(first=one, second=other, ran=ran)
    options.give(lambda: comparison_document(compared), lambda: comparison_text(compared))


def _together(store: Store, first: str, second: str) -> tuple[TriedPlan, TriedPlan]:
    """Return the plans, in a study that tried both of them if there is one and none was chosen."""
    one, other = _found(store, first), _found(store, second)
    if one.study.id != other.study.id and not _is_of_a_study(one, first) and not _is_of_a_study(other, second):
        with suppress(UnknownPlan):
            return one, store.find_plan(other.plan.id, study_id=one.study.id)
        with suppress(UnknownPlan):
            return store.find_plan(one.plan.id, study_id=other.study.id), other
    return one, other


def _is_of_a_study(tried: TriedPlan, name: str) -> bool:
    """Return whether the name chose a study."""
    return not tried.plan.id.startswith(name.lower())


def _found(store: Store, name: str) -> TriedPlan:
    """Return a plan by `PLAN`, `PLAN@STUDY`, or `STUDY` for its winner; the names may be shortened."""
    plan, _, study = name.partition("@")
    if study:
        return store.find_plan(plan, study_id=store.find_study(study).id)
    try:
        return store.find_plan(name)
    except UnknownPlan:
        with suppress(UnknownRecord):
            found = store.find_study(name)
            if (winner := store.winner(found.id)) is None:
                raise UnknownPlan(f"study {found.name} has no winner yet; name one of its plans") from None
            return store.find_plan(winner.plan.id, study_id=found.id)
        raise
