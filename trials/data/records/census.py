"""A count of what a record gives, independent of its reader, so that no turn or picture is lost on the way."""

import re
from typing import Any

from trials.data.records.columns import Chat, Columns, Pairs
from trials.data.records.record import Record
from trials.data.records.sample import IMAGE, VIDEO, Sample, Turn
from trials.data.records.watched import is_nothing

_PLACEHOLDER = re.compile(f"{IMAGE}|{VIDEO}")


class Miscounted(Exception):
    """A sample does not hold what its record gives, which is a fault of the reader."""


def check(record: Record, columns: Columns, sample: Sample) -> None:
    """Raise Miscounted for a turn, text, image or video that the sample lacks, or has in addition."""
    system: Any = record.get(columns.system) if columns.system else None
    given = [*([] if is_nothing(system) else [(system,)]), *_texts(record, columns)]
    _agree("turns", len(given), len(sample.turns))
    for texts, turn in zip(given, sample.turns, strict=True):
        if not _bare(turn.text).endswith(_bare("".join(texts))):
            raise Miscounted(f"the text {turn.text[:40]!r} is not that of its turn, {''.join(texts)[:40]!r}")
    asked = [turn.text for turn in sample.turns if turn.role == "user"]
    _agree(f"images and {IMAGE}", len(sample.images), sum(text.count(IMAGE) for text in asked))
    _agree("images and their sizes", len(sample.images), len(sample.image_sizes))
    if sample.videos:
        _agree(f"videos and {VIDEO}", len(sample.videos), sum(text.count(VIDEO) for text in asked))
    _check_media(record, columns, sample)
    _check_loss(record, columns, sample.turns)


def _texts(record: Record, columns: Columns) -> list[tuple[str, ...]]:
    """Return the texts of each turn but the system prompt of the record itself."""
    if isinstance(columns, Chat):
        return [_content(turn[columns.text]) for turn in record[columns.turns]]
    history = (columns.history and record.get(columns.history)) or []
    pairs = [*history, record] if columns.answer in record or not history else history
    return [text for pair in pairs for text in _pair(pair, columns)]


def _content(content: Any) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    return tuple(part["text"] for part in content if "text" in part["type"])


def _pair(pair: Any, columns: Pairs) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if isinstance(pair, list):
        return (pair[0],), (pair[1],)
    return ("\n".join(pair[key] for key in columns.questions if pair.get(key)),), (pair[columns.answer],)


def _check_media(record: Record, columns: Columns, sample: Sample) -> None:
    keyed = sum(_entries(record.get(key)) for key in columns.images)
    filmed = sum(_entries(record.get(key)) for key in columns.videos)
    parts = 0
    if isinstance(columns, Chat):
        contents = (turn[columns.text] for turn in record[columns.turns])
        parts = sum("text" not in part["type"] for each in contents if isinstance(each, list) for part in each)
    shown = len(sample.images) + len(sample.videos)
    # A list may be the frames of one video; a part shows an image of its own, or one of the record's.
    least, most = max(parts, keyed + min(filmed, 1)), parts + keyed + filmed
    if not least <= shown <= most:
        raise Miscounted(f"the record gives {least} to {most} images and videos, and the sample has {shown}")


def _entries(value: Any) -> int:
    return len(value) if isinstance(value, list) else int(not is_nothing(value))


def _check_loss(record: Record, columns: Columns, turns: tuple[Turn, ...]) -> None:
    """Every answer counts where no key but those of the text itself stands in its turn."""
    if not isinstance(columns, Chat) or columns.learns_last:
        return
    given = record[columns.turns]
    for turn, said in zip(given, turns[len(turns) - len(given) :], strict=True):
        if said.role == "assistant" and turn.keys() <= {columns.role, columns.text} and not said.is_learnt:
            raise Miscounted(f"the answer {said.text[:40]!r} is not learnt")


def _agree(what: str, given: int, held: int) -> None:
    if given != held:
        raise Miscounted(f"{what}: {given} are given, {held} are in the sample")


def _bare(text: str) -> str:
    """Return a text without its placeholders, which may be moved, and may show images or videos."""
    return _PLACEHOLDER.sub("", text)
