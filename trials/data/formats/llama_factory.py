"""LLaMA-Factory's conversations: `alpaca` and `sharegpt`, with the names that a dataset_info.json gives them.

Source: LLaMA-Factory's data/README.md and its converters.
"""

from trials.data.formats import AnnotationFile
from trials.data.records import conversation
from trials.data.records.columns import ALPACA, SHAREGPT
from trials.data.records.record import Record
from trials.data.records.sample import Sample

_ALL = (ALPACA, SHAREGPT)


def recognises(record: Record, container: str) -> bool:  # noqa: ARG001 - the same in every container
    """Return whether it is an instruction with its output; conversations are recognised by the other formats."""
    return ALPACA.fits(record)


def read(record: Record, file: AnnotationFile) -> Sample:
    """Return the conversation. Raise RecordError."""
    columns = file.columns or next((columns for columns in _ALL if columns.fits(record)), _ALL[0])
    return conversation.sample(record, columns, file.images)
