"""The head runs on targets alone: its time and bytes follow them, and those of other layers do not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.prediction.costs_table import TypicalPack, costs_document
from autotune.prediction.curves import Curves
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from tests.unit.prediction.test_shared_packs import levelled, sharing
from tests.values.search import COSTS, INDEX, predictor_of
from tests.values.training import plan_of
from trials.costs.coefficients import KINDS
from trials.data.index import DatasetIndex, profile
from trials.model.cut import cut
from trials.plan import Packed, Packing, Padded, Plan

PACKED = Packed(qv=12, qt=600, qv_min=12, qt_min=500)
HEAD = COSTS["head"]
TWO_STAGES = plan_of("5+2", "0+2", packing=PACKED)


def with_targets(share: float, index: DatasetIndex = INDEX) -> DatasetIndex:
    """The same samples, of which this share of the tokens are targets."""
    return replace(index, target_tokens=np.floor(share * index.text_tokens).astype(np.int32))


def predictor_with(share: float) -> Predictor:
    return predictor_of(index=with_targets(share))


@pytest.mark.parametrize("packing", [PACKED, Padded(samples=2)])
def test_the_time_of_the_head_follows_the_targets_of_a_pack(packing: Packing) -> None:
    plan = replace(TWO_STAGES, packing=packing)
    seconds, targets = [], []
    for predictor in (predictor_with(0.2), predictor_with(1.0)):
        sizes = predictor.sizes(packing, plan.layout)
        seconds.append(np.stack(predictor.times.pass_seconds(Parts.of(cut(plan)), plan.layout, sizes.table)))
        targets.append(sizes.epoch.packs.sums(sizes.epoch.index.target_tokens))
    of_target = np.array([HEAD.forward_seconds[1], HEAD.backward_seconds[1]])
    added = seconds[1] - seconds[0]
    assert (targets[1] > 4 * targets[0]).all()
    assert added[:, :, 1] == pytest.approx(np.outer(of_target, targets[1] - targets[0]))
    assert not added[:, :, 0].any()


def test_the_bytes_of_the_last_stage_follow_the_targets_of_its_heaviest_pack() -> None:
    equal = replace(
        INDEX, **{name: np.full_like(getattr(INDEX, name), 100) for name in ("vision_units", "text_tokens")}
    )
    plan = replace(TWO_STAGES, packing=Padded(samples=2))
    few, all_of_them = (
        predictor_of(index=with_targets(share, equal)).predict(plan).stage_bytes for share in (0.2, 1.0)
    )
    assert all_of_them[1] - few[1] == pytest.approx(HEAD.kept_bytes[1] * 2 * 80)
    assert all_of_them[0] == few[0]


def test_the_bytes_of_the_head_grow_less_beyond_the_targets_whose_logits_are_held_at_once() -> None:
    head = replace(HEAD, chunk_targets=100, further_share=0.25)
    costs = replace(COSTS, layers=(*COSTS.layers[:-1], ("head", head)))
    equal = with_targets(1.0, replace(INDEX, text_tokens=np.full_like(INDEX.text_tokens, 90)))
    for samples, saved in ((1, 0), (2, 80), (3, 170)):  # beyond 100 of 90, 180 and 270 targets
        plan = replace(TWO_STAGES, packing=Padded(samples=samples))
        peaks = [predictor_of(each, equal).predict(plan).stage_bytes for each in (COSTS, costs)]
        assert peaks[0][0] == peaks[1][0]
        assert peaks[0][1] - peaks[1][1] == pytest.approx(HEAD.kept_bytes[1] * 0.75 * saved)
    pack = replace(TypicalPack.of(profile(equal)), targets=300.0)
    assert pack.kept_bytes(costs, "head") == pytest.approx(HEAD.kept_bytes[1] * 150)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of("5+4", packing=PACKED),
        plan_of("5+4", packing=Padded(samples=2)),
        levelled("5+4", degrees=(1, 2), data=2, further=((0, 0),)),
    ],
    ids=["packed", "padded", "levels"],
)
def test_packs_without_any_target_are_predicted_as_with_a_head_that_costs_its_constant_alone(plan: Plan) -> None:
    """Of the plan with levels, the packs of the first one."""
    constant: dict[str, Any] = {
        name: (0.0, 0.0, 0.0, getattr(HEAD, name)[3]) for name in ("forward_seconds", "backward_seconds", "kept_bytes")
    }
    costs = sharing()
    idle = replace(costs, layers=tuple((k, replace(c, **constant) if k == "head" else c) for k, c in costs.layers))
    found = predictor_of(costs, with_targets(0.0)).predict(plan)
    # Equal numbers, with which packs are dealt to steps as without any.
    alike = replace(INDEX, target_tokens=np.ones_like(INDEX.target_tokens))
    wanted = predictor_of(idle, alike).predict(plan)
    assert found.step_seconds == pytest.approx(wanted.step_seconds)
    assert found.stage_bytes == pytest.approx(wanted.stage_bytes)


def test_a_level_without_targets_stands_beside_one_with_them() -> None:
    plan = levelled("5+2", "0+2", degrees=(1, 1), data=2, further=((0, 0), (0, 0)))
    long_alone = replace(INDEX, target_tokens=np.where(INDEX.text_tokens > 250, INDEX.text_tokens, 0))
    predictors = [predictor_of(index=index) for index in (with_targets(0.0), long_alone, with_targets(1.0))]
    targets = predictors[1].sizes(plan.packing, plan.layout)
    assert not targets.of_levels[0].table[:, 4].all()
    none, some, every = (predictor.predict(plan) for predictor in predictors)
    assert none.epoch_seconds < some.epoch_seconds < every.epoch_seconds
    assert none.stage_bytes[1] < some.stage_bytes[1] <= every.stage_bytes[1]


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    "plan",
    [
        plan_of("5+4", data=4, packing=replace(PACKED, sequence=4)),
        plan_of("5+4", tensor=2, packing=PACKED),
        plan_of("5+4", tensor=2, packing=Padded(samples=3)),
        levelled("5+4", degrees=(1, 2), data=4, further=((0, 0),)),
    ],
    ids=["shared", "cut", "cut, padded", "levels"],
)
def test_the_fullest_rank_of_a_pack_has_the_most_targets_where_samples_end_with_theirs(
    plan: Plan, share: float
) -> None:
    sizes = predictor_with(share).sizes(plan.packing, plan.layout)
    epoch = sizes.epoch
    for pack in range(len(epoch.packs)):
        rows = epoch.packs.pack(pack)
        longest = epoch.index.text_tokens[rows].max(initial=0)
        labels = []
        for row in rows:
            tokens, targets = int(epoch.index.text_tokens[row]), int(epoch.index.target_tokens[row])
            shown = [0] * (tokens - targets) + [1] * targets
            # Shifted; where all tokens are targets, the first is counted too.
            shown = [*shown[1:], 0] if targets < tokens else shown
            labels += shown + [0] * (int(longest) - tokens) * epoch.packs.padded
        ranks = int(sizes.degrees[pack]) * plan.layout.tensor
        size = -(-len(labels) // ranks)
        most = max(sum(labels[part * size : (part + 1) * size]) for part in range(ranks))
        assert sizes.table[pack, 4] == most
    assert sizes.samples_alone[:, 4] == pytest.approx(sizes.whole[:, 4] / sizes.ranks)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of("5+4", data=4, packing=replace(PACKED, sequence=4)),
        levelled("5+4", degrees=(4, 4), data=4, further=((0, 0),)),
    ],
    ids=["shared", "levels"],
)
def test_the_bytes_of_ranks_that_share_a_pack_may_be_those_of_evenly_dealt_targets(plan: Plan) -> None:
    columns = {name: np.full_like(getattr(INDEX, name), 400) for name in ("vision_units", "text_tokens")}
    equal = replace(INDEX, **columns, target_tokens=np.full_like(INDEX.target_tokens, 80))
    memory = predictor_of(sharing(), equal).predict(plan).stage_memory[0]
    # Packs of one sample: all of its 80 targets are in the last of four parts, or 20 in each.
    least = memory.expected - HEAD.kept_bytes[1] * 60
    assert memory.low == pytest.approx(memory.static + 0.99 * (least - memory.static))


def test_a_curve_of_the_head_is_read_at_the_targets_of_a_pack() -> None:
    curved = replace(
        COSTS,
        layers=tuple(
            (kind, replace(cost, curve_sizes=(10.0, 100.0), curve=(2.0, 1.0)) if kind == "head" else cost)
            for kind, cost in COSTS.layers
        ),
    )
    sizes = np.array([(3.0, 1000.0, 1e6, 1.0, 55.0), (3.0, 1000.0, 1e6, 1.0, 0.0)])
    assert Curves(curved).at(sizes)[:, KINDS.index("head")].tolist() == [1.5, 2.0]


def test_a_typical_pack_takes_the_curve_of_its_size_in_every_way() -> None:
    pack, language = TypicalPack.of(profile(with_targets(1.0))), COSTS["language"]
    usual = replace(language, selective_seconds=language.recompute_seconds)
    flat, twice = (
        costs_document(
            replace(COSTS, layers=tuple((kind, cost if kind == "language" else each) for kind, each in COSTS.layers)),
            pack,
        )["at_typical_pack"]["language"]
        for cost in (usual, replace(usual, curve_sizes=(1.0,), curve=(2.0,)))
    )
    for name in ("forward_seconds", "backward_seconds", "recompute_seconds", "selective_seconds"):
        assert twice[name] == pytest.approx(2 * flat[name])


def test_a_typical_pack_has_the_targets_of_mean_samples() -> None:
    few, all_of_them = (TypicalPack.of(profile(with_targets(share))) for share in (0.2, 1.0))
    assert few.tokens == all_of_them.tokens == all_of_them.targets
    assert few.targets == pytest.approx(0.2 * few.tokens, rel=0.02)
    heads = [costs_document(COSTS, pack)["at_typical_pack"]["head"] for pack in (few, all_of_them)]
    assert [head["kept_bytes"] for head in heads] == [HEAD.kept_bytes[1] * pack.targets for pack in (few, all_of_them)]
    more = all_of_them.targets - few.targets
    assert heads[1]["forward_seconds"] - heads[0]["forward_seconds"] == pytest.approx(HEAD.forward_seconds[1] * more)
