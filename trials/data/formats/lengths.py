"""OmniBal's length caches: the lengths of samples that are not there themselves.

Source: the files under data/vision of ModelTC/OmniBal.
"""

from trials.data.formats import AnnotationFile
from trials.data.records.record import Record, RecordError
from trials.data.records.sample import Lengths, Measured
from trials.data.records.watched import Watched

# Lengths are kept as 32-bit integers (`DatasetIndex`).
_MOST = 2**31 - 1


def recognises(record: Record, container: str) -> bool:  # noqa: ARG001 - the same in every container
    """Return whether it has the tiles and the tokens of a sample."""
    return "vit_num" in record and "token_num" in record


def read(record: Record, file: AnnotationFile) -> Measured:  # noqa: ARG001 - names nothing
    """Return the sample's lengths. Every token counts as a target, since the cache does not say. Raise RecordError.

    A sample of text has one tile that no token uses (`image_flags` 0). It is not counted.
    """
    watched = Watched(record)
    tokens = _count(watched, "token_num", 1)
    units = _count(watched, "vit_num", 0)
    shown = _count(watched, "image_flags" if "image_flags" in record else "vit_num", 0)
    lengths = Lengths(vision_units=units if shown else 0, text_tokens=tokens, target_tokens=tokens)
    return Measured(lengths=lengths, unused=watched.unused())


def _count(record: Record, key: str, least: int) -> int:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise RecordError(f"`{key}` is {repr(value)[:40]}; expected a whole number of at least {least}")
    return value
