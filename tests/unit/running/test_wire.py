import subprocess
import sys

import pytest
from hypothesis import given

from tests.values import strategies
from trials import wire
from trials.errors import InvalidPlan, WireError
from trials.job import Job
from trials.outcome import Outcome, Rejected
from trials.plan import Layout, Packing, Padded, Plan
from trials.stage import Stage
from trials.workload import Workload

PLAN = Plan(
    packing=Padded(samples=4),
    layout=Layout(pipeline=1, data=2, zero=2),
    stages=(Stage(vision=2, language=3, recompute_language=1),),
)


@given(strategies.plans())
def test_a_plan_survives_the_way_through_json(plan: Plan) -> None:
    assert wire.decode(Plan, wire.encode(plan)) == plan


@given(strategies.packings())
def test_the_kind_of_a_packing_is_decoded_from_its_json(packing: Packing) -> None:
    assert wire.decode(Packing, wire.encode(packing, Packing)) == packing


@given(strategies.outcomes)
def test_an_outcome_survives_the_way_through_json(outcome: Outcome) -> None:
    assert wire.decode(Outcome, wire.encode(outcome, Outcome)) == outcome


@given(strategies.workloads)
def test_a_workload_and_its_fingerprint_survive_the_way_through_json(workload: Workload) -> None:
    decoded = wire.decode(Workload, wire.encode(workload))
    assert decoded == workload
    assert decoded.fingerprint == workload.fingerprint


@given(strategies.jobs)
def test_a_job_survives_the_way_through_json(job: Job) -> None:
    assert wire.decode(Job, wire.encode(job)) == job


def test_json_is_canonical() -> None:
    assert wire.encode(PLAN.layout) == (
        '{"pipeline":1,"data":2,"zero":2,"tensor":1,"reduce_within":1,"offload":"none","bucket_bytes":0,"zero_bubble":false}'
    )


def test_ids_are_the_same_in_every_process_and_version() -> None:
    script = (
        f"from trials import wire; from trials.plan import Plan; print(wire.decode(Plan, {wire.encode(PLAN)!r}).id)"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == PLAN.id == "7d256bba68ea2db7"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "the message"),
        ('{"pipeline":1,"data":2}', "zero"),
        ('{"pipeline":1,"data":2,"zero":4}', "zero"),
        ('{"pipeline":1,"data":2,"zero":0,"expert":1}', "expert"),
        ("null", "the message is null"),
    ],
)
def test_a_bad_message_names_the_field(text: str, part: str) -> None:
    with pytest.raises(WireError, match=part):
        wire.decode(Layout, text)


def test_an_unknown_field_deep_inside_is_refused() -> None:
    with pytest.raises(WireError, match=r"stages\.0\.recompute: "):
        wire.decode(Plan, wire.encode(PLAN).replace("recompute_language", "recompute"))


def test_a_packing_without_its_kind_is_refused_in_words() -> None:
    with pytest.raises(WireError, match=r"packing: its kind is missing$"):
        wire.decode(Plan, wire.encode(PLAN).replace(',"kind":"padded"', ""))


def test_a_plan_that_contradicts_itself_is_refused_with_its_own_message() -> None:
    with pytest.raises(InvalidPlan, match="at least 1, not 1 x 0"):
        wire.decode(Layout, '{"pipeline":1,"data":0,"zero":1}')


def test_an_outcome_of_unknown_kind_is_refused() -> None:
    with pytest.raises(WireError, match="kind"):
        wire.decode(Outcome, '{"kind":"skipped"}')


def test_the_same_value_has_the_same_digest() -> None:
    assert wire.digest(Rejected(reason="x")) == wire.digest(Rejected(reason="x"))
    assert wire.digest(Rejected(reason="x")) != wire.digest(Rejected(reason="y"))
