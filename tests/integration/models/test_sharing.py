"""Packs that ranks share: loss and gradients equal those of the plain model on single samples."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.test_families import TINY
from tests.faulty_ranks import SHARING_FAULTS, serve_with_sharing_faults
from tests.integration.models.test_parity import check
from tests.integration.running.test_certificate import faults_in
from tests.own_ranks import on_ranks
from tests.parameters import parameters
from tests.training_values import PACKED, plan_of, prepared_of, variant_of
from trials import plugins
from trials.launchers.local import LocalLauncher
from trials.plan import Packed, Plan
from trials.run.pool import WarmPool
from trials.tasks.request import Certification, write_request

pytestmark = pytest.mark.ranks

SHARED = replace(PACKED, sequence=2)
BY_FOUR = replace(PACKED, sequence=4)
TIGHT = Packed(qv=3, qt=161, qv_min=0, qt_min=0, sequence=2)
"""Odd numbers of tokens and units, and packs of one unit or none."""
WITHIN = 1e-5

TWO_RANKS = {
    "full packs": plan_of("4+2", data=2, packing=SHARED),
    "small packs, recomputed, ZeRO 1": plan_of("4+2r3,1", data=2, zero=1, packing=TIGHT),
    "ZeRO 2, everything recomputed": plan_of("4+2r4,2", data=2, zero=2, packing=TIGHT),
    "ZeRO 3, recomputed": plan_of("4+2r1,1", data=2, zero=3, packing=TIGHT),
}
FOUR_RANKS = {
    "two packs in a row": plan_of("4+2r1,1", data=4, packing=TIGHT),
    "two packs in a row, ZeRO 1": plan_of("4+2r4,0", data=4, zero=1, packing=SHARED),
    "two packs in a row, ZeRO 2": plan_of("4+2", data=4, zero=2, packing=SHARED),
    "two packs in a row, ZeRO 3": plan_of("4+2r0,1", data=4, zero=3, packing=TIGHT),
    "more ranks than key heads": plan_of("4+2r2,2", data=4, packing=BY_FOUR),
    "more ranks than tiles, ZeRO 1": plan_of("4+2", data=4, zero=1, packing=replace(TIGHT, sequence=4)),
    "split in the vision tower": plan_of("2+0r1,0", "2+2r0,1", data=2, packing=TIGHT),
    "split in the language model, ZeRO 1": plan_of("4+1r1,1", "0+1r0,1", data=2, zero=1, packing=SHARED),
    "split between the two": plan_of("4+0", "0+2r0,1", data=2, packing=TIGHT),
}
FAMILIES = (
    "gemma3",
    "idefics3",
    "llava",
    "llava-next",
    "llava-onevision",
    "llava-siglip",
    "mistral3",
    "mistral3-inner-features",
    "pixtral",
    "qwen2-vl",
    "qwen2-5-vl",
    "qwen3-vl",
    "qwen3-vl-moe",
    "smolvlm",
)


@pytest.fixture(scope="module")
def tied_shallow(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with few layers, and an output projection that is the word embedding."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    return variant_of(shallow, tmp_path_factory.mktemp("tied"), change)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPool]:
    with WarmPool(LocalLauncher(tmp_path_factory.mktemp("four"), 4, "cpu")) as pool:
        yield pool


@pytest.mark.parametrize("plan", parameters(TWO_RANKS, short=("small packs, recomputed, ZeRO 1",)))
def test_packs_that_two_ranks_share_have_the_plain_models_gradients(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(shallow, tmp_path), pool, WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("plan", FOUR_RANKS.values(), ids=FOUR_RANKS)
def test_packs_shared_on_four_ranks_have_the_plain_models_gradients(
    plan: Plan, shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(shallow, tmp_path, hardware={"devices": 4}), four_ranks, WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("plan", [plan_of("4+1r1,0", "0+1", data=2, packing=TIGHT)], ids=["pipeline"])
def test_a_tied_embedding_of_shared_packs_gets_the_gradients_of_both_its_uses(
    plan: Plan, tied_shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(tied_shallow, tmp_path, hardware={"devices": 4}), four_ranks, WITHIN)


@pytest.mark.long
def test_features_of_inner_vision_layers_reach_the_ranks_that_share_the_pack(
    shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    plugins.load(TINY, "qwen3-vl").make(tmp_path / "model")
    packing = Packed(qv=200, qt=2000, qv_min=0, qt_min=0, sequence=2)
    plan = plan_of("4+1r2,1", "0+3r0,3", data=2, packing=packing)
    prepared = prepared_of(shallow, tmp_path, model={"path": str(tmp_path / "model")}, hardware={"devices": 4})
    check(plan, prepared, four_ranks, WITHIN)


@pytest.mark.parametrize("family", parameters({name: name for name in FAMILIES}, short=("qwen2-5-vl",)))
def test_every_family_shares_its_packs(family: str, example: Path, pool: WarmPool, tmp_path: Path) -> None:
    plugins.load(TINY, family).make(tmp_path / "model")
    prepared = prepared_of(example, tmp_path, model={"path": str(tmp_path / "model")})
    shape = prepared.workload.model
    units, tokens = (int(2.5 * column.max()) for column in (prepared.index.vision_units, prepared.index.text_tokens))
    packing = Packed(qv=units, qt=tokens, qv_min=0, qt_min=0, sequence=2)
    check(
        plan_of(f"{shape.vision_layers}+{shape.language_layers}r1,1", data=2, packing=packing), prepared, pool, WITHIN
    )


def test_every_fault_in_the_sharing_of_packs_shows(shallow: Path, tmp_path: Path) -> None:
    prepared = prepared_of(shallow, tmp_path, training={"global_batch_samples": 9})
    request = prepared.request(plan_of("4+2", data=2, packing=SHARED), Certification(step=0, reference="transformers"))
    for name in SHARING_FAULTS:
        write_request(tmp_path / name, request)
    assert on_ranks(serve_with_sharing_faults, tmp_path) == [True, True]
    found = {name: faults_in(tmp_path / name) for name in SHARING_FAULTS}
    assert found.pop("none") == ()
    for name, faults in found.items():
        assert any(text.startswith("the gradient of") for text in faults), name
