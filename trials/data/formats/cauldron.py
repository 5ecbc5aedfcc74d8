"""Questions and answers about images, as in The Cauldron, Docmatix and FineVision: `images` and `texts`."""

from trials.data.formats import AnnotationFile
from trials.data.records import conversation
from trials.data.records.columns import Pairs
from trials.data.records.record import Record
from trials.data.records.sample import Sample

TEXTS = Pairs(questions=("user",), answer="assistant", history="texts", unplaced=1000, unplaced_end="")


def recognises(record: Record, container: str) -> bool:  # noqa: ARG001 - the same in every container
    """Return whether there is a list under `texts` whose first entry has an answer."""
    return "texts" in record and TEXTS.fits(record)


def read(record: Record, file: AnnotationFile) -> Sample:
    """Return the conversation. Raise RecordError."""
    return conversation.sample(record, file.columns or TEXTS, file.images)
