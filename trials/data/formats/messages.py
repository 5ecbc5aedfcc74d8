"""Conversations as OpenAI and TRL write them: `messages` with `role` and `content`, a text or a list of parts."""

from trials.data.formats import AnnotationFile
from trials.data.records import conversation
from trials.data.records.columns import TOOL_CALLS, TOOL_RESULTS, Chat
from trials.data.records.record import Record
from trials.data.records.sample import Sample

MESSAGES = Chat(
    turns="messages",
    role="role",
    text="content",
    users=("user", *TOOL_RESULTS),
    assistants=("assistant", *TOOL_CALLS),
    systems=("system", "developer"),
    unplaced=1000,
    unplaced_end="",
)


def recognises(record: Record, container: str) -> bool:  # noqa: ARG001 - the same in every container
    """Return whether there is a list under `messages` whose first entry has a role."""
    return MESSAGES.fits(record)


def read(record: Record, file: AnnotationFile) -> Sample:
    """Return the conversation. Raise RecordError."""
    return conversation.sample(record, file.columns or MESSAGES, file.images)
