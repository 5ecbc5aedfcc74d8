"""Ids and targets of conversations are those of the model's own chat template and tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from tests.tiny_models import TEXT
from tests.values.chat_templates import FORMS, THOUGHT, TOKENS, Form
from tests.values.parameters import examples, parameters
from trials.data.records.sample import IGNORED, Encoder, Sample, Turn
from trials.errors import DataError
from trials.model.families import text
from trials.model.inputs.answers import REASONING

PLAIN, REASONED = (("one?", "one."), ("two?", "two.")), (("one?", THOUGHT), ("two?", "two."))
CODE = "def f():\n        return 1\n\n\n    # two  spaces"
SHORT = ("qwen3", "qwen3-thinking", "llama-2", "mistral", "gemma-2", "r1-distill", "vicuna", "exaone-deep")
"""Those that differ in how answers end, and in what becomes of thoughts"""


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a model for text with a template, and a tokenizer that may begin every text with a token."""

    def saved(form: Form, *, trims: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("model")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(TOKENS), show_progress=False
        )
        tokenizer.train_from_iterator([f"{CODE} one. two. {THOUGHT}"] * 3, trainer)
        bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
        parts = [processors.ByteLevel(trim_offsets=True)] * trims + [bos] * form.bos
        tokenizer.post_processor = processors.Sequence(parts)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<|endoftext|>"
        )
        fast.chat_template = form.template
        fast.save_pretrained(folder)
        AutoConfig.for_model("qwen3", **TEXT, vocab_size=len(tokenizer.get_vocab())).save_pretrained(folder)
        return folder

    return saved


def turns_of(pairs: Sequence[tuple[str, str]]) -> Sample:
    turns = [Turn(role="user" if n % 2 == 0 else "assistant", text=said) for n, said in enumerate(sum(pairs, ()))]
    return Sample(turns=tuple(turns), images=(), image_sizes=())


def targets(encoder: Encoder, sample: Sample) -> list[str]:
    """Return the text of each run of targets."""
    encoded = encoder.encode(sample, pixels=False)
    is_target = encoded.labels != IGNORED
    assert np.array_equal(encoded.labels[is_target], encoded.input_ids[is_target])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_target.astype(np.int8), [0]])))
    tokenizer: Any = encoder.measurer.processor.tokenizer  # type: ignore[attr-defined]
    return [tokenizer.decode(encoded.input_ids[start:end]) for start, end in edges.reshape(-1, 2)]


def asked(tokenizer: Any, sample: Sample) -> list[int]:
    """Return what transformers makes of the conversation."""
    messages = [{"role": turn.role, "content": turn.text} for turn in sample.turns]
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


@pytest.mark.parametrize("form", parameters(FORMS, short=SHORT))
def test_prompts_of_published_templates_are_those_of_the_training(form: Form, save: Callable[..., Path]) -> None:
    assert text.encoder(str(save(form))).other_prompt is None


@pytest.mark.parametrize("name", parameters({name: name for name in FORMS}, short=SHORT))
def test_ids_and_answers_are_those_of_published_templates(save: Callable[..., Path], name: str) -> None:
    form = FORMS[name]
    folder = save(form)
    encoder, tokenizer = text.encoder(str(folder)), AutoTokenizer.from_pretrained(folder)
    for pairs, expected, drops in ((PLAIN, form.plain, False), (REASONED, form.thought, form.drops)):
        sample = turns_of(pairs)
        assert encoder.encode(sample, pixels=False).input_ids.tolist() == asked(tokenizer, sample)
        assert targets(encoder, sample) == list(expected)
        assert encoder.measure(sample, ()).unused == (REASONING,) * drops


answers = st.lists(st.sampled_from(["a", "<", "<b", " ", "\n", "</", "think", ">", "</think>", "ö", "."]), max_size=6)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(answers.map("".join), min_size=1, max_size=4), name=st.sampled_from(sorted(FORMS)))
def test_every_answer_is_learnt_whole_or_named_or_refused(
    encoders: Callable[[str], Encoder], said: list[str], name: str
) -> None:
    encoder = encoders(name)
    sample = turns_of([(f"q{number}?", answer) for number, answer in enumerate(said)])
    try:
        unused = encoder.measure(sample, ()).unused
    except DataError:
        return
    learnt = "".join("".join(targets(encoder, sample)).split())
    for answer in said:
        kept = answer.rpartition("</think>")[2] if unused else answer
        whole = "".join(kept.split())
        assert whole in learnt, (name, answer)
        learnt = learnt[learnt.index(whole) + len(whole) :]


@pytest.fixture(scope="module")
def encoders(save: Callable[..., Path]) -> Callable[[str], Encoder]:
    made: dict[str, Encoder] = {}

    def encoder(name: str) -> Encoder:
        if name not in made:
            made[name] = text.encoder(str(save(FORMS[name])))
        return made[name]

    return encoder


def test_calls_of_tools_are_answers_though_their_results_are_turns_of_the_user(
    encoders: Callable[[str], Encoder],
) -> None:
    call, result = '{"name": "add"}', "<tool_response>\n3\n</tool_response>"
    sample = turns_of([("Add.", f"<think>\nby tool\n</think>\n\n{call}"), (result, "It is 3."), ("So?", "Yes.")])
    assert targets(encoders("qwen3"), sample) == [
        f"{call}<|im_end|>\n", "It is 3.<|im_end|>\n", "<think>\n\n</think>\n\nYes.<|im_end|>\n",
    ]  # fmt: skip
    during = turns_of([("Add.", f"<think>\nby tool\n</think>\n\n{call}"), (result, "It is 3.")])
    assert targets(encoders("qwen3"), during)[0] == f"<think>\nby tool\n</think>\n\n{call}<|im_end|>\n"


def test_an_answer_of_which_a_template_writes_nothing_is_an_error_of_the_data(
    encoders: Callable[[str], Encoder],
) -> None:
    sample = turns_of([("one?", "<think>\na\n</think>"), ("two?", "two.")])
    with pytest.raises(
        DataError, match=r"template leaves out all or a part of turn 2, '<think>.*; correct that answer"
    ):
        encoders("qwen3").measure(sample, ())


def test_a_question_that_a_template_leaves_out_is_an_error_of_the_data(save: Callable[..., Path]) -> None:
    forgetful = replace(FORMS["chatml"], template=FORMS["chatml"].template.replace("in messages", "in messages[-2:]"))
    with pytest.raises(DataError, match="template leaves out turn 1, 'one\\?'; take that out"):
        text.encoder(str(save(forgetful))).measure(turns_of(PLAIN), ())


def test_a_question_that_is_left_out_is_missed_though_another_one_is_alike(save: Callable[..., Path]) -> None:
    same = turns_of([("one?", "one."), ("go on", "two."), ("go on", "three.")])
    template = FORMS["chatml"].template.replace("in messages %}", "in messages if message is not sameas messages[2] %}")
    encoder = text.encoder(str(save(replace(FORMS["chatml"], template=template))))
    with pytest.raises(DataError, match="template leaves out turn 5, 'go on'; take that out"):
        encoder.measure(same, ())


def test_a_system_prompt_that_is_left_out_is_missed_though_another_turn_says_it_too(
    save: Callable[..., Path], encoders: Callable[[str], Encoder]
) -> None:
    asked = turns_of([("Be brief. So?", "No.")])
    same = replace(asked, turns=(Turn(role="system", text="Be brief."), *asked.turns))
    assert targets(encoders("chatml"), same) == ["No.<|im_end|>\n"]
    template = FORMS["chatml"].template.replace("in messages %}", "in messages if message['role'] != 'system' %}")
    encoder = text.encoder(str(save(replace(FORMS["chatml"], template=template))))
    with pytest.raises(DataError, match="template leaves out the system prompt; take that out"):
        encoder.measure(same, ())


@pytest.mark.parametrize("trims", [False, True])
def test_white_space_of_an_answer_is_learnt(save: Callable[..., Path], trims: bool) -> None:
    encoder = text.encoder(str(save(FORMS["chatml"], trims=trims)))
    assert targets(encoder, turns_of([("Write f.", CODE)])) == [f"{CODE}<|im_end|>\n"]


def test_an_answer_that_begins_like_a_prompt_is_learnt_from_its_beginning(encoders: Callable[[str], Encoder]) -> None:
    sample = turns_of([("one?", "<b>one</b>"), ("two?", "<t")])
    assert targets(encoders("qwen3-thinking"), sample)[0] == "<b>one</b><|im_end|>\n"


def test_an_answer_that_is_switched_off_may_be_left_out(encoders: Callable[[str], Encoder]) -> None:
    first, answer, *others = turns_of([("one?", "<think>\na\n</think>"), ("two?", "two.")]).turns
    sample = Sample(
        turns=(first, Turn(role="assistant", text=answer.text, is_learnt=False), *others), images=(), image_sizes=()
    )
    assert targets(encoders("r1-distill"), sample) == ["two.</s>"]
