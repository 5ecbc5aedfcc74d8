"""Turns of a conversation as chat templates write them, to find a trainer's template that writes the model's own."""

import re
from dataclasses import dataclass

from autotune.errors import ExportError
from trials.data.records.sample import Turn
from trials.job import ModelSection
from trials.model.plain.plain_inputs import PlainInputs
from trials.model.refusals.refusal import reason
from trials.model.skeleton import load_config

_QUESTIONS, _ANSWERS = ("Hello", "Where"), ("World", "There")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What a template writes around texts; white space may be other."""

    question: tuple[str, str]
    """Before and behind a question."""
    end: str = ""
    """Behind an answer; the tokenizer's own end or none where empty."""
    system: tuple[str, str] | None = None
    """Before and behind a system prompt, which comes first; None where it is part of a question."""
    first: str = ""
    """Before all, besides the tokenizer's own first token."""


_CHATML_END = "<|im_end|>"
CHATML = Turns(
    question=("<|im_start|>user", "<|im_end|> <|im_start|>assistant"),
    end=_CHATML_END,
    system=("<|im_start|>system", _CHATML_END),
)
VICUNA = Turns(question=("USER:", "ASSISTANT:"), system=("", ""))
MISTRAL = Turns(question=("[INST]", "[/INST]"))
LLAMA_3 = Turns(
    question=(
        "<|start_header_id|>user<|end_header_id|>",
        "<|eot_id|> <|start_header_id|>assistant<|end_header_id|>",
    ),
    end="<|eot_id|>",
    system=("<|start_header_id|>system<|end_header_id|>", "<|eot_id|>"),
)
GEMMA = Turns(question=("<start_of_turn>user", "<end_of_turn> <start_of_turn>model"), end="<end_of_turn>")
GLM_THINKING = Turns(
    question=("<|user|>", "<|assistant|> <think> </think>"), system=("<|system|>", ""), first="[gMASK] <sop>"
)
"""With an empty thought before each answer."""


class OwnTurns:
    """The turns that a model's own chat template writes."""

    def __init__(self, model: ModelSection) -> None:
        """Raise ExportError where the template cannot be read, or does not show two questions with their answers."""
        turns: list[Turn] = []
        for question, answer in zip(_QUESTIONS, _ANSWERS, strict=True):
            turns += [Turn(role="user", text=question), Turn(role="assistant", text=answer)]
        texts = [turn.text for turn in turns]
        try:
            config = load_config(model.path, trust_remote_code=model.trust_remote_code)
            plain = PlainInputs(model.path, config, trust_remote_code=model.trust_remote_code)
            written = plain.text(turns)
        except Exception as error:  # templates and a model's own code raise what they like
            raise ExportError(f"model.path: its chat template cannot be compared ({reason(error)})") from error
        pieces = re.split("|".join(texts), written)
        if len(pieces) != len(texts) + 1:
            raise ExportError("model.path: its chat template does not show two questions with their answers once each")
        self._head, *self._between, self._tail = pieces
        self._own_first, self._own_end = (_optional(token) for token in plain.ends())

    def system_of(self, turns: Turns) -> str | None:
        """Return the system prompt that the template writes for conversations without one, as part of such turns.

        It is empty where there is none. Return None where the template writes other turns.
        """
        before, behind = map(_loose, turns.question)
        end = _loose(turns.end) if turns.end else self._own_end
        prompt = ""
        if turns.system is not None:
            prompt = rf"(?:{_loose(turns.system[0])}(?P<prompt>\S.*?){_loose(turns.system[1])})?"
        head = re.fullmatch(f"{self._own_first}{_loose(turns.first)}{prompt}{before}", self._head, re.DOTALL)
        patterns = (behind, end + before, behind)
        fits = all(map(re.fullmatch, patterns, self._between)) and re.fullmatch(rf"{end}\s*", self._tail)
        if head is None or not fits:
            return None
        return head.groupdict().get("prompt") or ""


def _loose(text: str) -> str:
    """Return the pattern of a text with any white space at its ends, and in the places of its own."""
    return r"\s*".join(("", *map(re.escape, text.split()), ""))


def _optional(token: str | None) -> str:
    return rf"\s*(?:{re.escape(token)})?\s*" if token else r"\s*"
