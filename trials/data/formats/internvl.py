"""InternVL's JSON Lines of conversations.

Source: internvl.readthedocs.io, "Chat Data Format", and InternVL's training code where that page is silent.
"""

from trials.data.formats import AnnotationFile
from trials.data.records import conversation
from trials.data.records.columns import FROM_VALUE
from trials.data.records.record import Record
from trials.data.records.sample import Sample


def recognises(record: Record, container: str) -> bool:
    """Return whether it is a line with turns of `from` and `value`; the same record elsewhere is LLaVA's."""
    return FROM_VALUE.fits(record) and container == "json-lines" and "images" not in record


def read(record: Record, file: AnnotationFile) -> Sample:
    """Return the conversation, in which a system prompt of null is none. Raise RecordError."""
    match record.get(FROM_VALUE.turns):
        case [{"from": "system", "value": None}, *others]:
            record = {**record, FROM_VALUE.turns: others}
    return conversation.sample(record, file.columns or FROM_VALUE, file.images)
