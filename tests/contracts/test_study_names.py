"""A study has the name of its own model, where another folder of the same architecture came first."""

from dataclasses import replace

from storage.store import Store
from tests.values.storage import WORKLOAD, best_of, concluded, packed_plan, result_of

OTHER = replace(WORKLOAD, model=replace(WORKLOAD.model, name="my_other-model"))
"""Of another folder, with the same fingerprint."""


def test_studies_and_winners_have_the_names_of_their_own_models(store: Store) -> None:
    first, second = store.add_workload(WORKLOAD), store.add_workload(OTHER)
    assert first == second
    own = WORKLOAD.model.name
    names = (own, OTHER.model.name)
    studies = [store.create_study(first, {}, seed=0, model_name=name) for name in names]
    for study, name in zip(studies, names, strict=True):
        assert study.name == f"{name}-{study.id[:8]}"
        store.finish_trial(result_of(store.start_trial(study.id, packed_plan(), "default").id))
        concluded(store, best_of(study.id))
    for study, name in zip(studies, names, strict=True):
        winner = store.winner(study.id)
        assert winner is not None
        assert winner.workload.model.name == name
        assert study.named(store.workload(first)).model.name == name
        assert [each.id for each in store.studies(model_name=name.upper())] == [study.id]
        assert [best.study_id for best in store.best_plans(model_name=name)] == [study.id]
    assert {best.workload.model.name for best in store.best_plans()} == set(names)
    best = store.last_winner(first)
    assert best is not None
    assert best.workload.model.name == OTHER.model.name
    for text in (studies[0].id[:8], "my%", "myXother"):
        assert store.studies(model_name=text) == ()


def test_a_study_is_joined_whatever_the_name_of_the_folder(store: Store) -> None:
    fingerprint = store.add_workload(WORKLOAD)
    first = store.create_study(fingerprint, {}, seed=0, model_name="first")
    assert store.join_study(fingerprint, {}, 0, lambda _: True, model_name="second") == first
    other = store.join_study(fingerprint, {}, 0, lambda _: False, model_name="second")
    assert other.name.startswith("second-")
