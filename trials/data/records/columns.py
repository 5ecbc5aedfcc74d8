"""Where records of each format of conversations keep their parts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

UNSUPPORTED = (
    *("audio", "audios", "tools", "objects"),
    *("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images", "kto_tag"),
    *("mask_history", "train_on_inputs", "train_on_prompt", "train_on_input"),
)
"""Keys whose content a sample cannot hold, so that a record without them would be another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MediaColumns:
    images: tuple[str, ...] = ("image", "images")
    """Keys of the images; a record uses one of them."""
    videos: tuple[str, ...] = ("video", "videos")
    """Keys of the videos; a record uses one of them."""
    system: str | None = "system"
    """Key of a text that is said before all turns."""
    unplaced: int = 1
    """Most images that are shown at the start of the first user turn where no turn says their place."""
    unplaced_end: str = "\n"
    """What follows each of these images."""
    unsupported: tuple[str, ...] = UNSUPPORTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(_MediaColumns):
    """A list of turns, each with its side and its text."""

    turns: str
    role: str
    text: str
    users: tuple[str, ...]
    """Names of the user's side, whose texts are no targets."""
    assistants: tuple[str, ...]
    systems: tuple[str, ...] = ("system",)
    learns_last: bool = False
    """Whether the loss counts the last turn alone."""
    kind: Literal["chat"] = "chat"

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Return whether the first turn or answer of the record is where these columns say."""
        match record.get(self.turns):
            case [{self.role: str()}, *_]:
                return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(_MediaColumns):
    """Questions and answers under keys of their own."""

    questions: tuple[str, ...]
    """Texts under these keys are joined by a line feed."""
    answer: str
    history: str | None = None
    """List of earlier pairs, as [question, answer] or as objects with the same keys."""
    kind: Literal["pairs"] = "pairs"

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Return whether the first turn or answer of the record is where these columns say."""
        match record:
            case {self.answer: str()} if any(key in record for key in self.questions):
                return True
        match record.get(self.history or ""):
            case [{self.answer: str()}, *_]:
                return True
        return False


Columns: TypeAlias = Annotated[Chat | Pairs, Field(discriminator="kind")]

FROM_VALUE = Chat(turns="conversations", role="from", text="value", users=("human",), assistants=("gpt",))
"""Columns of InternVL, LLaVA and Qwen-VL."""
TOOL_RESULTS = ("tool", "observation", "tool_response", "function")
TOOL_CALLS = ("tool_call", "function_call")
"""Answers of tools are read as user turns, and calls of tools as assistant turns, which are targets."""

ALPACA = Pairs(questions=("instruction", "input"), answer="output", history="history", unplaced=0)
SHAREGPT = replace(
    FROM_VALUE,
    users=(*FROM_VALUE.users, *TOOL_RESULTS),
    assistants=(*FROM_VALUE.assistants, *TOOL_CALLS),
    unplaced=0,
)
"""LLaMA-Factory's own two."""
