"""Qwen-VL's conversations: like LLaVA's, with `image` or `images`.

Source: qwen-vl-finetune/README.md of QwenLM/Qwen3-VL.
"""

from trials.data.formats import AnnotationFile
from trials.data.records import conversation
from trials.data.records.columns import FROM_VALUE
from trials.data.records.record import Record
from trials.data.records.sample import Sample


def recognises(record: Record, container: str) -> bool:  # noqa: ARG001 - the same in every container
    """Return whether it has turns with `from` and `value`, and `images`.

    Without `images`, a record means the same as in the formats of InternVL and LLaVA, which recognise it.
    """
    return FROM_VALUE.fits(record) and "images" in record


def read(record: Record, file: AnnotationFile) -> Sample:
    """Return the conversation. Raise RecordError."""
    return conversation.sample(record, file.columns or FROM_VALUE, file.images)
