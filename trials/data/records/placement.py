"""Images and videos in their places in a conversation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from trials.data.records.record import RecordError
from trials.data.records.references import Picture, RecordImages
from trials.data.records.sample import IMAGE, VIDEO, Role, Sample, Turn, Video
from trials.units import number_of

AUDIO = "<audio>"
LOST_VIDEO = f"a question with the text {VIDEO} and without a video"
"""What is unused of a text that nearly always has lost its video."""
_OTHER_MARK = re.compile(
    r"<\|?(?:image|img|video)(?:[ _-]?\d+|_?(?:pad|placeholder|token|soft_token|here))\|?>|<\|(?:image|video)\|>"
    r"|<start_of_image>|<im_patch>|<IMG_CONTEXT>|<ImageHere>|\[IMG(?:_?\d+)?\]|<img>[^<]*</img>"
    rf"|(?!{IMAGE}|{VIDEO})(?i:{IMAGE}|{VIDEO})"
)
"""Marks by which other programs place an image."""
# A choice: `<img>...</img>` may hold a whole base64 image.
_SHOWN_CHARACTERS = 40

Medium = TypeVar("Medium", Picture, Video)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A turn as a record says it."""

    role: Role
    text: str
    images: tuple[Picture | None, ...] = ()
    """One entry per `<image>` of a user's text; None stands for the next image of the record's own key."""
    videos: tuple[Video | None, ...] = ()
    """The same for each `<video>`."""
    is_learnt: bool = True
    """Whether the loss counts it, if it is an answer."""
    has_video: bool = False
    """Whether a video is a separate part of the content, not a placeholder in the text."""


def placed(said: Sequence[Said], images: RecordImages, videos: tuple[Video, ...], unplaced: int, end: str) -> Sample:
    """Return the sample in which every `<image>` and `<video>` has what the record's own keys name.

    Where no turn has a place for `images` or `videos`, they are shown before the first question, at most `unplaced`
    of each, with `end` behind each. Raise RecordError where the counts differ.
    """
    turns = list(said)
    shows_images = bool(images.images) or any(image is not None for turn in turns for image in turn.images)
    shows_videos = bool(videos) or any(turn.has_video for turn in turns)
    unused = _check_marks(turns, shows_images=shows_images, shows_videos=shows_videos)
    if not videos and not any(turn.has_video for turn in turns):  # without a video, the word is text
        turns = [replace(turn, videos=()) for turn in turns]
    elif not images.images:
        turns = _read_as_videos(turns, len(videos))
    if not any(turn.videos for turn in turns) and 0 < len(videos) <= unplaced:
        turns = _before_first(turns, VIDEO + end, len(videos))
    if not any(turn.images for turn in turns) and 0 < len(images.images) <= unplaced:
        turns = _before_first(turns, IMAGE + end, len(images.images))
    shown = [image for turn in turns for image in turn.images]
    pictures = _filled(shown, images.images, f"{IMAGE} but the record names {number_of(len(images.images), 'image')}")
    filmed = [video for turn in turns for video in turn.videos]
    clips = _filled(filmed, videos, f"{VIDEO} but the record names {number_of(len(videos), 'video')}")
    sizes = iter(images.sizes)
    return Sample(
        turns=tuple(Turn(role=turn.role, text=turn.text, is_learnt=turn.is_learnt) for turn in turns),
        images=tuple(picture.image for picture in pictures),
        image_sizes=tuple(next(sizes) if image is None else None for image in shown),
        videos=clips,
        unused=unused,
        image_options=tuple(picture.options for picture in pictures) if any(each.options for each in pictures) else (),
    )


def _check_marks(turns: Sequence[Said], *, shows_images: bool, shows_videos: bool) -> tuple[str, ...]:
    """Return what the texts seem to say of images and videos, and is read as text.

    Raise RecordError for a mark of an image or a video that is shown in another place.
    """
    shown = {IMAGE: shows_images, VIDEO: shows_videos, AUDIO: False}
    found = []
    for number, turn in enumerate(turns, 1):
        for mark in (mark for mark in shown if mark in turn.text):
            if shown[mark] and turn.role != "user":
                raise RecordError(
                    f"the {turn.role} turn, {number} of all, holds {mark}, but only turns of the user show images and "
                    "videos; write it there, or spell it in another way"
                )
            # A user's <image> shows one, or the record is bad; <video> is an element of HTML, too.
            if not shown[mark] and (turn.role, mark) != ("user", IMAGE):
                found.append(LOST_VIDEO if (turn.role, mark) == ("user", VIDEO) else _as_text(mark))
    others = [(turn.role, other[0]) for turn in turns if (other := _OTHER_MARK.search(turn.text))]
    # Answers may hold such words as code.
    asked = [other for role, other in others if role == "user"]
    is_placed = any(turn.images or (shows_videos and turn.videos) for turn in turns)
    if asked and (shows_images or shows_videos) and not is_placed:
        raise RecordError(
            f"the text holds {asked[0][:_SHOWN_CHARACTERS]!r}, which places nothing here; write {IMAGE} where an "
            f"image is shown, and {VIDEO} where a video is"
        )
    found += [_as_text("<img>...</img>" if other.endswith("</img>") else other) for _, other in others]
    return tuple(dict.fromkeys(found))


def _as_text(mark: str) -> str:
    return f"the text {mark}, read as text"


def _read_as_videos(turns: list[Said], count: int) -> list[Said]:
    """Read each `<image>` as a video where there are as many and no `<video>`, as LLaVA-Video writes them."""
    shown = [image for turn in turns for image in turn.images]
    if any(turn.videos for turn in turns) or shown != [None] * count:
        return turns
    return [
        replace(turn, text=turn.text.replace(IMAGE, VIDEO), images=(), videos=turn.videos + (None,) * len(turn.images))
        if turn.images
        else turn
        for turn in turns
    ]


def _before_first(turns: list[Said], mark: str, count: int) -> list[Said]:
    """Return the turns with `count` marks at the start of the first question, if there is one."""
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return turns
    turn, added = turns[first], (None,) * count
    marked = replace(
        turn,
        text=mark * count + turn.text,
        images=added if mark.startswith(IMAGE) else turn.images,
        videos=added if mark.startswith(VIDEO) else turn.videos,
    )
    return [*turns[:first], marked, *turns[first + 1 :]]


def _filled(shown: Sequence[Medium | None], own: Sequence[Medium], what: str) -> tuple[Medium, ...]:
    """Return what is shown, with the next of `own` where a place names nothing. Raise RecordError for other counts."""
    if shown.count(None) != len(own):
        raise RecordError(f"the user's turns hold {shown.count(None)} {what}")
    rest = iter(own)
    return tuple(next(rest) if each is None else each for each in shown)
