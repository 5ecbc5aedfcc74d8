import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.dimensions.folds import layout_text
from autotune.plan_text import plan_parts
from autotune.search.solver.candidates import CandidateStages
from autotune.search.solver.rungs import with_rungs
from autotune.search.solver.splits import layer_counts
from tests.values import strategies
from tests.values.training import plan_of
from trials.errors import InvalidPlan
from trials.model.cut import check_layers, cut
from trials.model.refusals.heads import check_degrees
from trials.plan import Layout, Levelled, Packed, Padded, Plan, ZeroStage
from trials.stage import Recomputed, Stage
from trials.units import number_of

PACKED = Packed(qv=8, qt=512, qv_min=8, qt_min=384)


def pipeline(*stages: Stage) -> Plan:
    return Plan(packing=PACKED, layout=Layout(pipeline=len(stages), data=1, zero=0), stages=stages)


def stage_sums(plan: Plan) -> tuple[int, int]:
    return sum(stage.vision for stage in plan.stages), sum(stage.language for stage in plan.stages)


@given(strategies.plans())
def test_equal_plans_have_equal_ids(plan: Plan) -> None:
    twin = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout))
    assert (twin, hash(twin), twin.id) == (plan, hash(plan), plan.id)


@given(strategies.plans(), strategies.plans())
def test_different_plans_have_different_ids(one: Plan, other: Plan) -> None:
    assert (one == other) == (one.id == other.id)


@given(strategies.plans())
def test_a_plan_fits_a_model_of_its_own_layers(plan: Plan) -> None:
    vision, language = stage_sums(plan)
    check_layers(plan, vision_layers=vision, language_layers=language, dtype="float32")


@given(strategies.plans(), st.integers(1, 9))
def test_a_plan_that_misses_layers_says_how_many(plan: Plan, missing: int) -> None:
    vision, language = stage_sums(plan)
    text = f"stages hold {number_of(language, 'language layer')} but the model has {language + missing}; add {missing}"
    with pytest.raises(InvalidPlan, match=text):
        check_layers(plan, vision_layers=vision, language_layers=language + missing, dtype="float32")


@given(strategies.plans())
def test_ranks_are_pipeline_times_data_times_tensor(plan: Plan) -> None:
    assert plan.layout.world_size == plan.layout.pipeline * plan.layout.data * plan.layout.tensor


@given(strategies.plans())
def test_the_text_embedding_is_with_the_last_vision_layer_or_on_the_first_stage(plan: Plan) -> None:
    vision, _ = stage_sums(plan)
    projecting = [number for number, part in enumerate(cut(plan)) if part.projects]
    assert projecting == [max((n for n, stage in enumerate(plan.stages) if stage.vision), default=0)]
    text_alone = pipeline(*(Stage(vision=0, language=stage.vision + stage.language) for stage in plan.stages))
    assert [part.projects for part in cut(text_alone)] == [True, *[False] * (len(plan.stages) - 1)]
    ends = np.array(plan.boundaries)
    held = CandidateStages.of(np.arange(len(ends)), np.array([0, *ends[:-1]]), ends, vision, len(ends))
    assert np.flatnonzero(held.projects).tolist() == projecting


def test_a_plan_with_too_many_layers_says_how_many() -> None:
    with pytest.raises(InvalidPlan, match="stages hold 5 vision layers but the model has 3; remove 2"):
        check_layers(pipeline(Stage(vision=5, language=1)), vision_layers=3, language_layers=1, dtype="float32")


def test_bfloat16_weights_need_the_float32_copies_of_zero_1() -> None:
    stages = (Stage(vision=1, language=1),)
    for zero in get_args(ZeroStage):
        plan = Plan(packing=PACKED, layout=Layout(pipeline=1, data=2, zero=zero), stages=stages)
        refused = pytest.raises(InvalidPlan, match=r"cannot be trained with ZeRO 0, .* use ZeRO 1")
        with nullcontext() if zero else refused:
            check_layers(plan, vision_layers=1, language_layers=1, dtype="bfloat16")


def deferring(*most: int | None) -> Plan:
    """Return a plan with zero bubble; `most` are the packs that each stage may defer, None for all."""
    stages = tuple(Stage(vision=0, language=1, most_deferred=each) for each in most)
    return Plan(packing=PACKED, layout=Layout(pipeline=len(most), data=1, zero=0, zero_bubble=True), stages=stages)


def test_stages_defer_as_many_packs_as_there_are_stages_before_or_fewer() -> None:
    assert deferring(None, None, None).most_deferred == (0, 1, 2)
    fewer = deferring(None, None, 1)
    assert fewer.most_deferred == (0, 1, 1)
    assert [part.most_deferred for part in cut(fewer)] == [0, 1, 1]
    assert plan_parts(fewer)["layout"].endswith("zero bubble deferring 0 | 1 | 1 packs")
    usual = pipeline(Stage(vision=0, language=1), Stage(vision=0, language=1))
    assert usual.most_deferred == (0, 0)
    for most in ((None, None, 2), (None, 1, None), (0, None)):
        with pytest.raises(InvalidPlan, match=r"most_deferred \d lowers nothing on stage \d .*; leave it out"):
            deferring(*most)
    with pytest.raises(InvalidPlan, match="most_deferred 0 lowers nothing on stage 1"):
        pipeline(Stage(vision=0, language=1), Stage(vision=0, language=1, most_deferred=0))
    with pytest.raises(InvalidPlan, match="zero_bubble defers nothing"):
        deferring(None, 0, 0)


def test_stages_and_pipeline_must_agree() -> None:
    with pytest.raises(InvalidPlan, match="describes 1 stage but pipeline is 2"):
        Plan(packing=PACKED, layout=Layout(pipeline=2, data=1, zero=0), stages=(Stage(vision=1, language=1),))


def test_vision_layers_cannot_follow_language_layers() -> None:
    with pytest.raises(InvalidPlan, match="stage 1 holds vision layers after"):
        pipeline(Stage(vision=1, language=1), Stage(vision=1, language=0))


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipeline_refuses_high_zero_stages(zero: int) -> None:
    with pytest.raises(InvalidPlan, match=f"ZeRO {zero} does not work with a pipeline"):
        Layout(pipeline=2, data=1, zero=zero)  # type: ignore[arg-type]


@pytest.mark.parametrize("zero", [2, 3])
def test_cut_layers_refuse_high_zero_stages(zero: int) -> None:
    message = f"ZeRO {zero} does not work with tensor degree 4; use ZeRO 0 or 1, or tensor 1"
    with pytest.raises(InvalidPlan, match=message):
        Layout(pipeline=1, data=2, tensor=4, zero=zero)  # type: ignore[arg-type]


def test_plans_without_cut_layers_keep_the_document_of_older_plans() -> None:
    stages = (Stage(vision=1, language=1),)
    whole, cut_in_two = (
        Plan(packing=PACKED, layout=Layout(pipeline=1, data=2, tensor=degree, zero=0), stages=stages)
        for degree in (1, 2)
    )
    assert '"layout":{"pipeline":1,"data":2,"zero":0}' in whole.document
    assert '"tensor":2' in cut_in_two.document
    assert plan_parts(whole)["layout"] == "pipeline 1 x data 2, ZeRO 0"
    assert plan_parts(cut_in_two)["layout"] == "pipeline 1 x data 2 x tensor 2, ZeRO 0"


def test_groups_that_average_first_are_part_of_the_id_and_their_absence_is_not() -> None:
    layout = Layout(pipeline=1, data=4, zero=1)
    plan = Plan(packing=PACKED, layout=layout, stages=(Stage(vision=2, language=2),))
    grouped = dataclasses.replace(plan, layout=dataclasses.replace(layout, reduce_within=2))
    assert "reduce_within" not in plan.document
    assert '"reduce_within":2' in grouped.document
    assert grouped.id != plan.id
    assert plan_parts(grouped)["layout"] == "pipeline 1 x data 4, ZeRO 1, averages over 2 ranks of a node first"


def test_averages_during_the_last_backward_pass_are_part_of_the_id_and_their_absence_is_not() -> None:
    layout = Layout(pipeline=1, data=4, zero=1)
    plan = Plan(packing=PACKED, layout=layout, stages=(Stage(vision=2, language=2),))
    during = dataclasses.replace(plan, layout=dataclasses.replace(layout, bucket_bytes=1 << 20))
    assert "bucket_bytes" not in plan.document
    assert '"bucket_bytes":1048576' in during.document
    assert during.id != plan.id
    assert plan_parts(during)["layout"] == "pipeline 1 x data 4, ZeRO 1, averages during the last backward pass"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2, data=2, zero=1),
        Layout(pipeline=1, data=2, tensor=2, zero=1),
        Layout(pipeline=1, data=1, zero=0),
        Layout(pipeline=1, data=2, zero=2),
        Layout(pipeline=1, data=4, zero=1, reduce_within=2),
    ],
    ids=layout_text,
)
def test_other_layouts_cannot_average_gradients_during_a_pass(layout: Layout) -> None:
    with pytest.raises(InvalidPlan, match="several data ranks, ZeRO 0 or 1 and reduce_within 1; leave bucket_bytes"):
        dataclasses.replace(layout, bucket_bytes=1 << 20)


def test_a_bucket_has_bytes() -> None:
    with pytest.raises(InvalidPlan, match="a bucket of -1 bytes of gradients is impossible; use 0 or more"):
        Layout(pipeline=1, data=4, zero=1, bucket_bytes=-1)


@pytest.mark.parametrize(
    ("data", "zero", "within", "message"),
    [
        (4, 2, 2, "ZeRO 2 averages gradients over all data ranks at once; use ZeRO 0 or 1, or reduce_within 1"),
        (6, 1, 4, "reduce_within 4 does not divide 6 data ranks into several groups; use 1 or 2 or 3"),
        (4, 1, 4, "reduce_within 4 does not divide 4 data ranks into several groups; use 1 or 2"),
        (4, 1, 0, "reduce_within 0 does not divide 4 data ranks into several groups"),
        (1, 0, 2, "reduce_within 2 does not divide 1 data ranks into several groups; use 1"),
    ],
)
def test_groups_that_average_first_divide_the_data_ranks(data: int, zero: ZeroStage, within: int, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        Layout(pipeline=1, data=data, zero=zero, reduce_within=within)


@pytest.mark.parametrize(("pipeline_degree", "data", "tensor"), [(0, 1, 1), (1, 0, 1), (-1, 2, 1), (2, 2, 0)])
def test_degrees_are_at_least_one(pipeline_degree: int, data: int, tensor: int) -> None:
    with pytest.raises(InvalidPlan, match=f"not {pipeline_degree} x {data} x {tensor}"):
        Layout(pipeline=pipeline_degree, data=data, tensor=tensor, zero=0)


@pytest.mark.parametrize(("vision", "language"), [(0, 0), (-1, 2), (2, -1)])
def test_a_stage_holds_a_layer(vision: int, language: int) -> None:
    with pytest.raises(InvalidPlan, match=f"not {vision} vision"):
        Stage(vision=vision, language=language)


def test_a_stage_cannot_recompute_more_than_it_holds() -> None:
    with pytest.raises(InvalidPlan, match="of 2 vision and 3 language layers cannot recompute 3 vision"):
        Stage(vision=2, language=3, recompute_vision=3)


@pytest.mark.parametrize("counts", [{"selective_vision": 3}, {"recompute_language": 2, "selective_language": 2}])
def test_a_layer_is_recomputed_as_a_whole_or_selectively(counts: dict[str, int]) -> None:
    with pytest.raises(InvalidPlan, match=r"cannot recompute \d (vision|language) layers and \d selectively"):
        Stage(vision=2, language=3, **counts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "stage", "remedy"),
    [
        ({"zero": 3}, "2+3s1,0", "ZeRO 2"),
        ({"zero": 3}, "2+3s0,1", "ZeRO 2"),
        ({"zero": 1, "offload": "vision"}, "2+3r1,0s1,0", "offload none"),
        ({"zero": 1, "offload": "both"}, "2+3s0,3", "offload none"),
    ],
)
def test_selective_recomputation_needs_weights_and_what_layers_keep(
    layout: dict[str, Any], stage: str, remedy: str
) -> None:
    with pytest.raises(InvalidPlan, match=f"selective recomputation needs; use {remedy}, or selective 0"):
        dataclasses.replace(plan_of(stage, data=2), layout=Layout(pipeline=1, data=2, **layout))


def test_a_tower_may_offload_while_the_other_is_recomputed_selectively() -> None:
    layout = Layout(pipeline=1, data=2, zero=1, offload="vision")
    plan = dataclasses.replace(plan_of("2+3r1,0s0,2", data=2), layout=layout)
    assert plan_parts(plan)["recompute"] == "offload v, recompute l 1v+0l and 0v+2l selectively"


@pytest.mark.parametrize(
    ("recomputed", "each", "more", "expected"),
    [
        ((1, 0), 1, 2, (3, 0)),
        ((1, 0), 1, 9, (4, 0)),
        ((0, 1), 2, 1, (0, 2)),
        ((0, 3), 2, 2, (1, 3)),  # four selectively, then the first of them as a whole
        ((1, 3), 2, -2, (0, 3)),
        ((4, 0), 2, -1, (3, 1)),
        ((1, 3), 2, 9, (4, 0)),
        ((0, 2), 2, -9, (0, 0)),
    ],
)
def test_rungs_of_four_layers(recomputed: tuple[int, int], each: int, more: int, expected: tuple[int, int]) -> None:
    whole, selective = recomputed
    counts = Recomputed(vision=7, language=whole, selective_language=selective)
    found = with_rungs(counts, "language", 4, each, more)
    assert (found.vision, found.language, found.selective_language) == (7, *expected)


@pytest.mark.parametrize("changes", [{"qv_min": 9}, {"qt_min": 513}, {"qt": 0, "qt_min": 0}, {"qv_min": -1}])
def test_a_relaxation_lies_within_the_capacity(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidPlan, match="0 <= qv_min <= qv"):
        dataclasses.replace(PACKED, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"qv": 1 << 31}, {"qt": 1 << 40}])
def test_a_capacity_is_one_that_lengths_can_reach(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidPlan, match=r"more than any pack can hold; give less than 2\^31"):
        dataclasses.replace(PACKED, **changes)  # type: ignore[arg-type]


def test_a_sequence_degree_divides_the_data_ranks() -> None:
    layout, stages = Layout(pipeline=1, data=6, zero=0), (Stage(vision=1, language=1),)
    shared = dataclasses.replace(PACKED, sequence=3)
    assert Plan(packing=shared, layout=layout, stages=stages).packing.degrees == (3,)
    message = (
        "sequence degree 4 needs groups of 4 data ranks, but 6 data ranks leave 2 over; use a degree of 1 or 2 or 3"
    )
    with pytest.raises(InvalidPlan, match=f"{message} or 6, or data 8"):
        Plan(packing=dataclasses.replace(PACKED, sequence=4), layout=layout, stages=stages)
    with pytest.raises(InvalidPlan, match="sequence degree of at least 1, not 0"):
        dataclasses.replace(PACKED, sequence=0)


def test_levels_hold_longer_samples_one_after_the_other() -> None:
    with pytest.raises(InvalidPlan, match="needs at least 2 levels, not 1; give that of one level alone"):
        Levelled(levels=(PACKED,))
    for other in (PACKED, dataclasses.replace(PACKED, qv=20, qt=500)):
        with pytest.raises(InvalidPlan, match=f"level 2 with qv={other.qv} qt={other.qt} must hold longer .* qt=512"):
            Levelled(levels=(PACKED, other))


def test_every_stage_says_what_it_recomputes_at_each_level() -> None:
    longer = dataclasses.replace(PACKED, qt=1024, sequence=2)
    packing, layout = Levelled(levels=(PACKED, longer)), Layout(pipeline=1, data=2, zero=0)
    again = Recomputed(vision=1, language=0)
    stage = Stage(vision=2, language=1, recompute_language=1, further_levels=(again,))
    plan = Plan(packing=packing, layout=layout, stages=(stage,))
    (part,) = cut(plan)
    assert part.levels == (Recomputed(vision=0, language=1), again)
    assert plan_parts(plan)["recompute"] == "0v+1l; level 2 1v+0l"
    assert "level 2 packs of Qv 8, Qt 1024" in plan_parts(plan)["packing"]
    assert plan_parts(plan)["packing"].endswith("shared by 2 ranks")
    with pytest.raises(InvalidPlan, match="stage 0 recomputes layers for 1 level of packs but the packing has 2; give"):
        Plan(packing=packing, layout=layout, stages=(Stage(vision=2, language=1),))
    with pytest.raises(InvalidPlan, match="for 2 levels of packs but the packing has 1; give its further_levels 0"):
        Plan(packing=PACKED, layout=layout, stages=(stage,))
    with pytest.raises(InvalidPlan, match="of 2 vision and 1 language layers cannot recompute 3 vision"):
        dataclasses.replace(stage, further_levels=(Recomputed(vision=3, language=0),))
    with pytest.raises(InvalidPlan, match="sequence degree 2 needs groups of 2 data ranks"):
        Plan(packing=packing, layout=Layout(pipeline=1, data=3, zero=0), stages=(stage,))


def test_packs_that_no_ranks_share_keep_the_document_of_older_plans() -> None:
    whole, shared = (
        Plan(
            packing=dataclasses.replace(PACKED, sequence=degree),
            layout=Layout(pipeline=1, data=2, zero=0),
            stages=(Stage(vision=1, language=1),),
        )
        for degree in (1, 2)
    )
    assert "sequence" not in whole.document
    assert '"sequence":2' in shared.document


@pytest.mark.parametrize(
    ("heads", "groups", "degrees", "message"),
    [
        (
            12,
            12,
            (5,),
            "cannot share the 12 attention heads of the language model: 2 would be left over; use a degree of ",
        ),
        (
            12,
            4,
            (3,),
            "cannot share the 4 key-value heads of the language model: 1 would be left over; use a degree of ",
        ),
        (12, 4, (2, 24), "the 12 attention heads .* use a degree of 1, 2, 4 or 12"),
    ],
)
def test_a_sequence_degree_shares_the_heads(heads: int, groups: int, degrees: tuple[int, ...], message: str) -> None:
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=groups)
    check_degrees(config, (1, 2, 4, 12))
    with pytest.raises(InvalidPlan, match=message):
        check_degrees(config, degrees)


def test_a_sequence_degree_shares_the_heads_that_the_tensor_degree_leaves_to_a_rank() -> None:
    config = SimpleNamespace(num_attention_heads=12, num_key_value_heads=4)
    check_degrees(config, (1, 2, 6), tensor=2)
    message = (
        "degree 4 cannot share the 6 attention heads of the language model that tensor degree 2 leaves to a rank: 2 "
        "would be left over; use a degree of 1, 2 or 6"
    )
    with pytest.raises(InvalidPlan, match=message):
        check_degrees(config, (4,), tensor=2)


def test_a_padded_micro_batch_holds_a_sample() -> None:
    with pytest.raises(InvalidPlan, match="not 0"):
        Padded(samples=0)


def test_boundaries_split_the_chain_into_vision_and_language_layers() -> None:
    assert layer_counts((2, 6, 9), vision_layers=5) == ((2, 0), (3, 1), (0, 3))
    assert layer_counts((5, 9), vision_layers=5) == ((5, 0), (0, 4))
