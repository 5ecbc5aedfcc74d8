"""LLaVA's conversations: one JSON list, or a table.

Source: LLaVA's docs/Finetune_Custom_Data.md.
"""

from trials.data.formats import AnnotationFile
from trials.data.records import conversation
from trials.data.records.columns import FROM_VALUE
from trials.data.records.record import Record
from trials.data.records.sample import Sample


def recognises(record: Record, container: str) -> bool:
    """Return whether it has turns with `from` and `value`, and is no line of its own."""
    return FROM_VALUE.fits(record) and container != "json-lines" and "images" not in record


def read(record: Record, file: AnnotationFile) -> Sample:
    """Return the conversation. Raise RecordError."""
    return conversation.sample(record, file.columns or FROM_VALUE, file.images)
