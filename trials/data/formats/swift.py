"""ms-swift's conversations: `messages`, `query` and `response`, or a list of `human` and `assistant`.

Source: ms-swift's documentation, "Custom dataset", and its preprocessors.
"""

from dataclasses import replace

from trials.data.formats import AnnotationFile
from trials.data.formats.messages import MESSAGES
from trials.data.records import conversation
from trials.data.records.columns import FROM_VALUE, Pairs
from trials.data.records.record import Record
from trials.data.records.sample import Sample

_QUERY = Pairs(questions=("query",), answer="response", history="history", unplaced=1000, unplaced_end="")
_ROUNDS = Pairs(questions=("human",), answer="assistant", history="conversation", unplaced=1000, unplaced_end="")
_CONVERSATIONS = replace(MESSAGES, turns="conversations")
_ALL = (MESSAGES, _QUERY, _ROUNDS, _CONVERSATIONS, replace(FROM_VALUE, unplaced=1000, unplaced_end=""))


def recognises(record: Record, container: str) -> bool:  # noqa: ARG001 - the same in every container
    """Return whether only ms-swift writes such a record; its `messages` are those of the format of that name."""
    return any(columns.fits(record) for columns in (_QUERY, _ROUNDS, _CONVERSATIONS))


def read(record: Record, file: AnnotationFile) -> Sample:
    """Return the conversation. Raise RecordError."""
    columns = file.columns or next((columns for columns in _ALL if columns.fits(record)), _ALL[0])
    return conversation.sample(record, columns, file.images)
