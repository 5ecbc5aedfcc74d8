"""Records of any format of conversations, read by the `Columns` that say where the parts stand."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from trials.data.records.census import check
from trials.data.records.columns import TOOL_CALLS, TOOL_RESULTS, Chat, Columns, Pairs
from trials.data.records.image_options import options_of
from trials.data.records.placement import Said, placed
from trials.data.records.record import AS_TEXT, Record, RecordError, is_as_text
from trials.data.records.references import Picture, gives_image, images_of, is_unicode, picture_of
from trials.data.records.sample import IMAGE, VIDEO, Role, Sample, Video
from trials.data.records.video_references import video_of, videos_of
from trials.data.records.watched import Watched, is_nothing, speaks_of_loss

_TEXT_KEYS = ("value", "content", "text")
_SWITCHES = {**dict.fromkeys(("loss", "loss_scale", "weight", "train", "training"), True), "masked": False}
"""Keys that say whether the loss counts a turn, and the value with which it does: of ms-swift, OpenAI and Mistral,
Axolotl, and torchtune."""
_RECORD_SWITCHES = {
    **_SWITCHES,
    **dict.fromkeys(("do_train", "loss_mask", "loss_weight", "sample_weight", "trainable", "weights"), True),
    **dict.fromkeys(("ignore", "ignore_loss"), False),
}
"""The same of a whole record, where `label` and `mask` may be the answer and a picture."""
_STATES = {
    **dict.fromkeys((True, "true", "yes", "1", "1.0"), True),
    **dict.fromkeys((False, "false", "no", "0", "0.0"), False),
}
"""Values of these keys; numbers equal the bools."""
TOOLS = "the form of calls and results of tools, which are read as plain assistant and user turns"
_REASONING = ("reasoning_content", "reasoning", "thinking")
_SHOWN_KEYS, _SHOWN_CHARACTERS = 10, 120
_REMEDIES = {
    "image": "name the column of the images",
    "images": "name the column of the images",
    "video": "name the column of the videos",
    "videos": "name the column of the videos",
    "tools": "describe them in the system turn",
}
_VIDEO_KEYS = ("video", "video_url", "frames", "url", "path")


def sample(record: Record, columns: Columns, root: Path) -> Sample:
    """Return the record's conversation; names of images and videos are relative to `root`.

    Raise RecordError, and Miscounted for a conversation that does not hold all that the record gives.
    """
    watched = Watched(record)
    _check_whole(watched, columns)
    said: list[Said] = []
    if columns.system and not is_nothing(watched.get(columns.system)):
        said.append(Said(role="system", text=_text(watched[columns.system], f"`{columns.system}`")))
    said += _chat(watched, columns, root) if isinstance(columns, Chat) else _pairs(watched, columns)
    videos = videos_of(watched, columns.videos, root)
    found = placed(said, images_of(watched, columns.images, root), videos, columns.unplaced, columns.unplaced_end)
    check(record, columns, found)
    _check_answers(found)
    return replace(
        found, unused=(*found.unused, *watched.unused(has_video=bool(found.videos)), *_tools(record, columns))
    )


def _tools(record: Record, columns: Columns) -> tuple[str, ...]:
    """Return that the form of calls and results of tools is unused, where turns are from some."""
    if not isinstance(columns, Chat) or not isinstance(turns := record.get(columns.turns), list):
        return ()
    sides = (turn.get(columns.role) for turn in turns if isinstance(turn, dict))
    return (TOOLS,) if any(side in (*TOOL_RESULTS, *TOOL_CALLS) for side in sides) else ()


def _check_whole(record: Record, columns: Columns) -> None:
    """Raise RecordError for what the record says of itself as a whole and a sample cannot hold."""
    for key in columns.unsupported:
        value = record.get(key)
        if not is_nothing(value) and not (key.startswith(("mask_", "train_")) and _state(value) is False):
            raise RecordError(f"`{key}` is not supported; {_REMEDIES.get(key, 'remove it, or leave the record out')}")
    # `dict.get` is no look at the key for `Watched`: a label of another type stays among the unused keys.
    if isinstance(dict.get(record, "label"), bool):
        raise RecordError(
            "`label` says whether the completion is liked, which is not supported; leave out the records that are not, "
            "and remove the key"
        )
    if _switched(record, "the record", _RECORD_SWITCHES) is False:
        raise RecordError("the record says that the loss does not count it; leave it out")


def _check_answers(found: Sample) -> None:
    """Raise RecordError for an answer without a character, of which a model would learn to say nothing."""
    for number, turn in enumerate(found.turns, 1):
        if turn.role == "assistant" and turn.is_learnt and not turn.text.strip():
            raise RecordError(
                f"the assistant turn, {number} of all, is empty, so that the model would learn to end its answer at "
                "once; write the answer, leave the record out, or set `loss` of the turn to false"
            )


# --- a list of turns ---


def _chat(record: Record, columns: Chat, root: Path) -> Iterator[Said]:
    turns = record.get(columns.turns)
    if is_as_text(turns):
        raise RecordError(f"`{columns.turns}` {AS_TEXT}")
    if not isinstance(turns, list):
        fault = "is not a list" if columns.turns in record else "is missing"
        raise RecordError(f"`{columns.turns}` {fault}; the record has {_keys(record)}")
    if not turns:
        raise RecordError(f"`{columns.turns}` is empty")
    _check_order(turns, columns)
    for number, turn in enumerate(turns, 1):
        said = _turn(turn, f"turn {number}", columns, root)
        if columns.learns_last and number < len(turns):
            if said.is_learnt and said.role == "assistant" and _switched(turn, f"turn {number}"):
                raise RecordError(
                    f"turn {number} is to be learnt, but of a prompt and its completion only the latter is"
                )
            said = replace(said, is_learnt=False)
        yield said


def _check_order(turns: list[Any], columns: Chat) -> None:
    """Raise RecordError for image parts that are numbered in another order than they stand in."""
    contents = (turn.get(columns.text) for turn in turns if isinstance(turn, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict))
    numbers = [part["index"] for part in parts if part.get("type") == "image" and part.get("index") is not None]
    if numbers != list(range(len(numbers))):
        raise RecordError(
            f"image parts have `index` {repr(numbers)[:40]}, but images are shown in their order; write the parts and "
            "the images in one order, and remove `index`"
        )


def _turn(turn: object, where: str, columns: Chat, root: Path) -> Said:
    if not isinstance(turn, dict):
        raise RecordError(f"{where} is not an object with `{columns.role}` and `{columns.text}`")
    role = _role(turn.get(columns.role), where, columns)
    for key in ("tool_calls", "function_call"):
        if turn.get(key):
            raise RecordError(f"{where} has `{key}`, which is not supported; write the call as its text")
    if reasoning := next((key for key in _REASONING if turn.get(key)), None):
        raise RecordError(
            f"{where} has `{reasoning}` as well as its text, which is not supported; write it into the text"
        )
    is_learnt = _is_learnt(turn, role, where, (columns.role, columns.text))
    content = turn.get(columns.text)
    if isinstance(content, list):
        return replace(_parts(content, role, where, root), is_learnt=is_learnt)
    if not isinstance(content, str):
        slip = next((key for key in _TEXT_KEYS if key in turn and content is None and key != columns.text), None)
        hint = f"; it has `{slip}`, rename that to `{columns.text}`" if slip else ""
        raise RecordError(f"{where} has no text under `{columns.text}`{hint}")
    return replace(_said(role, _text(content, where)), is_learnt=is_learnt)


def _role(name: object, where: str, columns: Chat) -> Role:
    sides: dict[Role, tuple[str, ...]] = {
        "user": columns.users,
        "assistant": columns.assistants,
        "system": columns.systems,
    }
    for role, names in sides.items():
        if isinstance(name, str) and name in names:
            return role
    *others, last = (name for names in sides.values() for name in names)
    raise RecordError(f"{where} is from {repr(name)[:40]}; expected {', '.join(others)} or {last}")


def _is_learnt(turn: dict[str, Any], role: Role, where: str, own: Collection[str]) -> bool:
    """Return whether the loss counts a turn, if it is an answer. Raise RecordError.

    No other turn can be learnt, and of its keys but its `own` none may speak of the loss in another way.
    """
    state = _switched(turn, where)
    if state and role != "assistant":
        raise RecordError(f"{where} is to be learnt, but the loss counts answers alone; remove what says so")
    for key in turn:
        if key not in (*_SWITCHES, *own) and speaks_of_loss(key) and not is_nothing(dict.get(turn, key)):
            raise RecordError(
                f"{where} has `{key[:40]}`, which is not supported; say by `loss`, true or false, whether the loss "
                "counts an answer, and remove it"
            )
    return state is not False


def _switched(given: dict[str, Any], where: str, switches: Mapping[str, bool] = _SWITCHES) -> bool | None:
    """Return what the `switches` of a turn, part or record say about the loss, None for nothing.

    Raise RecordError for parts of a loss, and for a turn's keys that speak of it and are not known.
    """
    states = []
    for key in given:
        if key in switches:
            if is_nothing(value := given.get(key)):
                continue
            if (state := _state(value)) is None:
                raise RecordError(
                    f"`{key}` of {where} is {repr(value)[:40]}; expected true or false, because the loss counts a turn "
                    "in full or not at all"
                )
            states.append(state is switches[key])
    return all(states) if states else None


def _state(value: object) -> bool | None:
    """Return the bool that a value spells, None for any other value."""
    spelled = value.strip().lower() if isinstance(value, str) else value
    return _STATES.get(spelled) if isinstance(spelled, str | int | float) else None


def _parts(parts: list[Any], role: Role, where: str, root: Path) -> Said:
    """Return a turn from a list of texts, images and videos, as OpenAI, TRL and Qwen write it."""
    texts: list[str] = []
    images: list[Picture | None] = []
    videos: list[Video | None] = []
    for number, part in enumerate(parts, 1):
        what = f"part {number} of {where}"
        match part:
            case {"type": "text" | "input_text" | "output_text"}:
                if not _is_learnt(part, role, what, ()) and role == "assistant":
                    raise RecordError(
                        f"{what} is left out of the loss, which counts a turn in full or not at all; write `loss` into "
                        "the turn"
                    )
                texts.append(_text(part.get("text"), what))
                images += [None] * texts[-1].count(IMAGE)
                videos += [None] * texts[-1].count(VIDEO)
            case {"type": "image" | "image_url" | "input_image"}:
                texts.append(IMAGE)
                images.append(_own_picture(part, what, root))
            case {"type": "video" | "video_url"}:
                texts.append(VIDEO)
                own = any(not is_nothing(part.get(key)) for key in _VIDEO_KEYS)
                videos.append(video_of(part, what, root) if own else None)
            case _:
                kind = part.get("type") if isinstance(part, dict) else part
                raise RecordError(f"{what} is {repr(kind)[:40]}; expected a text, an image or a video")
    whole = "".join(texts)
    if role == "user":
        # Two texts may join to a mark that neither of them has, which would move all images behind it.
        if (whole.count(IMAGE), whole.count(VIDEO)) != (len(images), len(videos)):
            raise RecordError(f"parts of {where} make {IMAGE} or {VIDEO} of their texts together; write it in one part")
        has_video = any("text" not in part["type"] and text == VIDEO for part, text in zip(parts, texts, strict=True))
        return Said(role=role, text=whole, images=tuple(images), videos=tuple(videos), has_video=has_video)
    if other := next((part["type"] for part in parts if "text" not in part["type"]), None):
        kind = "a video" if other.startswith("video") else "an image"
        raise RecordError(f"{where} contains {kind}, but only turns of the user may")
    return Said(role=role, text=whole)


def _own_picture(part: dict[str, Any], what: str, root: Path) -> Picture | None:
    """Return a part's own image; one without it shows the next image of the record's key. Raise RecordError."""
    if gives_image(part):
        return picture_of(part, what, root)
    if options_of(part, what):
        raise RecordError(f"{what} has options of an image that is named elsewhere; write them where it is named")
    return None


def _said(role: Role, text: str) -> Said:
    """Return a turn of text alone; sides other than the user may spell the placeholders."""
    if role != "user":
        return Said(role=role, text=text)
    return Said(role=role, text=text, images=(None,) * text.count(IMAGE), videos=(None,) * text.count(VIDEO))


# --- questions and answers ---


def _pairs(record: Record, columns: Pairs) -> Iterator[Said]:
    history = record.get(columns.history) if columns.history else None
    if history is not None and not isinstance(history, list):
        fault = AS_TEXT if is_as_text(history) else "is not a list of questions with their answers"
        raise RecordError(f"`{columns.history}` {fault}")
    for number, pair in enumerate(history or (), 1):
        yield from _pair(pair, f"pair {number} of `{columns.history}`", columns, record)
    if columns.answer in record or not history:
        yield from _pair(record, "the record", columns, record)


def _pair(pair: object, where: str, columns: Pairs, record: Record) -> Iterator[Said]:
    match pair:
        case [question, answer]:
            questions, is_learnt = [question], True
        case dict() if any(key in pair for key in columns.questions):
            questions = [pair[key] for key in columns.questions if not is_nothing(pair.get(key))]
            answer = pair.get(columns.answer)
            own = (*columns.questions, columns.answer)
            is_learnt = pair is record or _is_learnt(pair, "assistant", where, own)
        case _:
            keys = pair if isinstance(pair, dict) else ()
            raise RecordError(f"{where} has no question under {_keys(columns.questions)}; it has {_keys(keys)}")
    yield _said("user", "\n".join(_text(question, f"the question of {where}") for question in questions))
    yield replace(_said("assistant", _text(answer, f"the answer of {where}")), is_learnt=is_learnt)


# --- both ---


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{what} is not a text but {'null' if value is None else repr(value)[:40]}")
    if not is_unicode(value):
        raise RecordError(f"{what} holds half of a surrogate pair, which is not a character")
    return value


def _keys(keys: Iterable[str]) -> str:
    shown = ", ".join(islice(keys, _SHOWN_KEYS)).encode(errors="backslashreplace").decode()
    return shown[:_SHOWN_CHARACTERS] or "no keys"
