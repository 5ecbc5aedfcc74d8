"""Patterns with which trainers choose the layers that get an adapter."""

import re
from dataclasses import dataclass

from trials.workload import Part

_NAME = r"[A-Za-z_]\w*"
_CHOICE = rf"\((?:\?:)?{_NAME}(?:\|{_NAME})*\)"
_ANY_NUMBER = r"\[\\d\]\+|\\d\+|\[0-9\]\+"
_STEP = re.compile(rf"(?P<words>{_NAME}|{_CHOICE})|{_ANY_NUMBER}|\([\w.\\]+\)\?(?=[\w(])")
"""A step of the path to a layer: a name, a choice of names, any number, or a name that may be missing."""
_BETWEEN = re.compile(r"\.\*(?:\\?\.)?|\\?\.|")
_LAYERS = re.compile(rf"(?P<before>\w*)(?P<choice>{_CHOICE})?(?P<after>\w*)$")
_PARTS: dict[str, Part] = {
    "merger": "projector",
    "multi_modal_projector": "projector",
    "connector": "projector",
    "mlp1": "projector",
    "visual": "vision",
    "vision_tower": "vision",
    "vision_model": "vision",
    "language_model": "language",
    "text_model": "language",
}
"""Part by a name on its path; those that are inside another part stand first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTargets:
    """Layers that get an adapter."""

    part: Part
    names: tuple[str, ...]
    """Names, or ends of names, as in `training.lora.targets`."""


def targets_of(pattern: str) -> AdapterTargets | None:
    """Return the layers that a pattern means; None for one that is not a path to the same layers of every block.

    One is `model.language_model.layers.[0-9]+.(mlp|self_attn).(up|down|q|v)_proj`. A number in place of `[0-9]+`, and
    what looks ahead, would choose some of the blocks.
    """
    rest = pattern.removeprefix("^").removesuffix("$")
    steps: list[list[str]] = []
    while (last := _LAYERS.match(rest)) is None or not last[0]:
        step = _STEP.match(rest)
        between = _BETWEEN.match(rest, step.end() if step else 0)
        if between is None or not between.end():
            return None
        if step and step["words"]:
            steps.append(_words(step["words"]))
        rest = rest[between.end() :]
    part = next((part for name, part in _PARTS.items() if [name] in steps), None)
    if part is None:
        return None
    names = [f"{last['before']}{word}{last['after']}" for word in _words(last["choice"] or "()")]
    inside = steps[-1]
    # Layers of one name are in one kind of block; a single name says which.
    return AdapterTargets(
        part=part, names=tuple(f"{inside[0]}.{name}" if _is_block(inside) else name for name in names)
    )


def _words(step: str) -> list[str]:
    return step.strip("()").removeprefix("?:").split("|")


def _is_block(names: list[str]) -> bool:
    return len(names) == 1 and names[0] not in (*_PARTS, "layers", "blocks")
