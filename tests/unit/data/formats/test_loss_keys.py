"""Keys that speak of the loss are followed or refused, wherever they stand."""

from typing import Any

import pytest

from tests.unit.data.formats.test_unused import ANSWERED, ASKED, read, unused
from trials.data.records.sample import Sample

PART = {"type": "text", "text": "q"}


def with_answer(**keys: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", **keys}]}


@pytest.mark.parametrize("key", ["loss", "loss_scale", "weight", "train", "training"])
@pytest.mark.parametrize("value", [False, 0, 0.0, "false", "False", "0", "no"])
def test_a_turn_is_left_out_of_the_loss_by_any_form_of_false(key: str, value: object) -> None:
    found = read("internvl", with_answer(**{key: value}))
    assert isinstance(found, Sample), found
    assert [turn.is_learnt for turn in found.turns] == [True, False]
    assert found.unused == ()


@pytest.mark.parametrize(
    ("keys", "is_learnt"),
    [({"masked": True}, False), ({"masked": 0}, True), ({"loss": 1, "train": "yes"}, True), ({"labels": []}, True)],
)
def test_other_switches_of_the_loss_are_followed(keys: dict[str, Any], is_learnt: bool) -> None:
    found = read("internvl", with_answer(**keys))
    assert isinstance(found, Sample), found
    assert found.turns[1].is_learnt is is_learnt
    pair = read("swift", {"conversation": [{"human": "q", "assistant": "a", **keys}]})
    assert isinstance(pair, Sample), pair
    assert pair.turns[1].is_learnt is is_learnt


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"weight": 0.5}, "`weight` of turn 2 is 0.5; expected true or false"),
        ({"loss": "maybe"}, "`loss` of turn 2 is 'maybe'"),
        ({"loss": [True]}, "`loss` of turn 2 is [True]"),
        ({"train_detail": [{"begin_offset": 0}]}, "turn 2 has `train_detail`, which is not supported; say by `loss`"),
        *(
            ({key: 0}, f"turn 2 has `{key}`, which")
            for key in ("mask", "loss_mask", "trainable", "train_on_turn", "Loss", "ignore", "label", "labels", "learn")
        ),
    ],
)
def test_a_turn_that_speaks_of_the_loss_in_another_way_is_refused(keys: dict[str, Any], reason: str) -> None:
    assert reason in str(read("internvl", with_answer(**keys)))


@pytest.mark.parametrize(("key", "value"), [("train", True), ("weight", 1), ("loss", "true"), ("masked", False)])
def test_a_question_or_an_answer_of_a_prompt_cannot_be_learnt(key: str, value: object) -> None:
    line = with_answer()
    line["conversations"][0][key] = value
    assert read("internvl", line) == "turn 1 is to be learnt, but the loss counts answers alone; remove what says so"
    prompt = [ASKED, {**ANSWERED, key: value}, ASKED]
    reason = read("prompt-completion", {"prompt": prompt, "completion": [ANSWERED]})
    assert "turn 2 is to be learnt, but of a prompt and its completion only the latter is" in str(reason)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"weight": 0.5}, "`weight` of the record is 0.5"),
        ({"loss_scale": 0}, "the record says that the loss does not count it; leave it out"),
        ({"sample_weight": 0}, "the record says that the loss does not count it; leave it out"),
        ({"do_train": "false"}, "the record says that the loss does not count it; leave it out"),
        ({"ignore_loss": True}, "the record says that the loss does not count it; leave it out"),
        ({"sample_weight": 2}, "`sample_weight` of the record is 2; expected true or false"),
        ({"loss_mask": [0, 1]}, "`loss_mask` of the record is [0, 1]; expected true or false"),
        ({"mask_history": True}, "`mask_history` is not supported"),
        ({"train_on_inputs": "true"}, "`train_on_inputs` is not supported"),
        ({"chosen": "b"}, "`chosen` is not supported"),
        ({"kto_tag": False}, "`kto_tag` is not supported"),
        ({"label": False}, "`label` says whether the completion is liked"),
    ],
)
def test_a_record_that_changes_its_loss_is_refused(keys: dict[str, Any], reason: str) -> None:
    assert reason in str(read("internvl", {**with_answer(), **keys}))
    assert reason in str(read("swift", {"query": "q", "response": "a", **keys}))


def test_a_record_may_say_what_is_done_in_any_case() -> None:
    assert unused(weight=1.0, sample_weight=1, ignore=False, loss_mask=[]) == ()
    assert unused(mask_history=False, train_on_inputs=0, tools=[], kto_tag=None) == ()


def test_labels_and_masks_of_a_record_may_be_those_of_another_task_and_are_named() -> None:
    assert unused(label=3, labels=[1, 7], mask="a_mask.png", split="test") == (
        *("the key `label`", "the key `labels`", "the key `mask`", "the key `split`"),
    )


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"loss": False}, "part 1 of turn 2 is left out of the loss, which counts a turn in full or not at all"),
        ({"weight": 0.5}, "`weight` of part 1 of turn 2 is 0.5; expected true or false"),
        ({"loss_mask": 1}, "part 1 of turn 2 has `loss_mask`, which is not supported; say by `loss`"),
    ],
)
def test_a_part_of_an_answer_that_changes_its_loss_is_refused(keys: dict[str, Any], reason: str) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a", **keys}]}
    assert reason in str(read("messages", {"messages": [ASKED, answer]}))


def test_a_part_of_an_answer_may_say_what_is_done_in_any_case() -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a", "loss": True, "masked": 0}]}
    found = read("messages", {"messages": [{"role": "user", "content": [{**PART, "weight": 0}]}, answer]})
    assert isinstance(found, Sample), found
    assert (found.turns[1].is_learnt, found.unused) == (True, ())
