"""LLaMA-Factory's conversations: `alpaca` and `sharegpt`, with the names that a dataset_info.json gives them.

Source: LLaMA-Factory's data/README.md and its converters.
"""

from dataclasses import replace

from trials.data import conversation
from trials.data.columns import FROM_VALUE, TOOL_CALLS, TOOL_RESULTS, Pairs
from trials.data.formats import AnnotationFile
from trials.data.record import Record
from trials.data.sample import Sample

ALPACA = Pairs(questions=("instruction", "input"), answer="output", history="history", unplaced=0)
SHAREGPT = replace(
    FROM_VALUE,
    users=(*FROM_VALUE.users, *TOOL_RESULTS),
    assistants=(*FROM_VALUE.assistants, *TOOL_CALLS),
    unplaced=0,
)
_ALL = (ALPACA, SHAREGPT)


def recognises(record: Record, container: str) -> bool:  # noqa: ARG001 - the same in every container
    """An instruction with its output; a conversation is recognised as one of the other formats."""
    return ALPACA.fits(record)


def read(record: Record, file: AnnotationFile) -> Sample:
    """The conversation. Raises RecordError."""
    columns = file.columns or next((columns for columns in _ALL if columns.fits(record)), _ALL[0])
    return conversation.sample(record, columns, file.images)
