"""TRL's prompts with their completions: two texts, or two lists of messages, with `images`.

Source: TRL's documentation, "Dataset formats and types", and its data collator for vision-language models.
"""

from dataclasses import replace
from typing import Any

from trials.data.formats import AnnotationFile
from trials.data.formats.messages import MESSAGES
from trials.data.records import conversation
from trials.data.records.record import Record, RecordError
from trials.data.records.sample import Sample
from trials.data.records.watched import is_nothing

_COLUMNS = replace(MESSAGES, learns_last=True)


def recognises(record: Record, container: str) -> bool:  # noqa: ARG001 - the same in every container
    """Return whether there are a prompt and a completion."""
    return all(isinstance(record.get(key), str | list) for key in ("prompt", "completion"))


def read(record: Record, file: AnnotationFile) -> Sample:
    """Return the conversation, of which the completion alone is learnt. Raise RecordError."""
    match record.get("prompt"), record.get("completion"):
        case str() as prompt, str() as completion:
            messages: list[Any] = [_message("user", prompt), _message("assistant", completion)]
        case [*_, dict() as last] as prompt, [dict() as answer] if _answers(answer) and not _answers(last):
            messages = [*prompt, answer]
        case list(), list():
            raise RecordError(
                "`prompt` has to end with a question, and `completion` to be one answer to it; write a record for each "
                "answer to learn"
            )
        case _:
            raise RecordError("`prompt` and `completion` have to be two texts, or two lists of messages")
    others = {key: value for key, value in record.items() if key not in ("prompt", "completion")}
    beside = others.pop(MESSAGES.turns, None)  # a conversation that the chosen format does not read
    columns = MESSAGES if isinstance(record["prompt"], str) else _COLUMNS
    found = conversation.sample({**others, MESSAGES.turns: messages}, columns, file.images)
    return found if is_nothing(beside) else replace(found, unused=(*found.unused, f"the key `{MESSAGES.turns}`"))


def _message(role: str, text: str) -> dict[str, str]:
    return {MESSAGES.role: role, MESSAGES.text: text}


def _answers(message: dict[str, Any]) -> bool:
    return message.get(MESSAGES.role) in MESSAGES.assistants
