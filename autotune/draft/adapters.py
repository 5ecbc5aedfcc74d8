"""Adapters and frozen parts of a job from the arguments of another trainer."""

import re
from dataclasses import dataclass

from autotune.draft.draft import Draft
from autotune.draft.given import Given, count, flag, number, text, texts
from autotune.errors import JobError
from trials.job import PARTS
from trials.workload import Part

_NAME = r"[A-Za-z_]\w*"
_CHOICE = rf"\((?:\?:)?{_NAME}(?:\|{_NAME})*\)"
_ANY_NUMBER = r"\[\\d\]\+|\\d\+|\[0-9\]\+"
_STEP = re.compile(rf"(?P<words>{_NAME}|{_CHOICE})|{_ANY_NUMBER}|\([\w.\\]+\)\?(?=[\w(])")
"""A step of the path to a layer: a name, a choice of names, any number, or a name that may be missing."""
_BETWEEN = re.compile(r"\.\*(?:\\?\.)?|\\?\.|")
_LAYERS = re.compile(rf"(?P<before>\w*)(?P<choice>{_CHOICE})?(?P<after>\w*)$")
PARTS_BY_NAME: dict[str, Part] = {
    "merger": "projector",
    "multi_modal_projector": "projector",
    "connector": "projector",
    "mlp1": "projector",
    "aligner": "projector",
    "deepstack_merger_list": "projector",
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
    part = next((part for name, part in PARTS_BY_NAME.items() if [name] in steps), None)
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
    return len(names) == 1 and names[0] not in (*PARTS_BY_NAME, "layers", "blocks")


_RANK, _ALPHA = 8, 8
"""Defaults of peft."""


def take_adapters(given: Given, draft: Draft) -> None:
    """Take what is trained: adapters, or the weights of parts. Raise JobError for another way to tune a model."""
    kind, rank = given.take("finetuning_type", text), given.take("lora_rank", count)
    enabled = given.take("lora_enable", flag)
    if kind not in (None, "full", "lora"):
        raise JobError(f"finetuning_type: {kind} is not supported; give full or lora")
    frozen = [part for part in PARTS if given.take(f"freeze_{part}", flag) or given.take(f"tune_{part}", flag) is False]
    alpha, of_rank = given.take("lora_alpha", count), given.take("lora_alpha_of_rank", count)
    dropout, target = given.take("lora_dropout", number), given.take("lora_target", texts)
    trains_projector, trains_vision = (given.take(f"lora_train_{part}", flag) for part in ("projector", "vision"))
    if not (kind == "lora" or enabled or (kind is None and rank and enabled is None)):
        _leave_out_rates(draft, frozen)
        if frozen:
            draft.values["training.freeze"] = frozen
        return
    if rank is None:
        draft.notes.append(f"The rank of the adapters is not given; training.lora.rank is {_RANK}, the default of peft")
    rank = rank or _RANK
    if alpha is None:
        alpha = of_rank * rank if of_rank and "lora_alpha" not in given.unknown else _default_alpha(draft)
    targets = _targets(target or [], draft)
    parts = [targets.part] if targets else [part for part in PARTS if part not in frozen] or ["language"]
    draft.values |= {
        "training.lora.rank": rank,
        "training.lora.alpha": alpha,
        "training.lora.parts": parts,
    }
    if given.take("adapts_all_parts", flag) and not targets and len(parts) < len(PARTS):
        draft.notes.append(
            "Layers with the names of the adapters have one in every part there, also in frozen ones; here in those of "
            "training.lora.parts alone, so add the others"
        )
    if trains_projector:
        draft.values["training.lora.train_projector"] = True
    if trains_vision:
        draft.notes.append(
            "The vision tower's own weights train there along with the adapters; here they are frozen, since only the "
            "projector can (training.lora.train_projector). Add vision to training.lora.parts for adapters in it"
        )
    _leave_out_rates(
        draft, [part for part in PARTS if part not in parts and not (part == "projector" and trains_projector)]
    )
    if dropout:
        draft.notes.append(f"A dropout of {dropout:g} in the adapters is not supported and left out")


def _default_alpha(draft: Draft) -> int:
    draft.notes.append(f"The alpha of the adapters is not given; training.lora.alpha is {_ALPHA}, the default of peft")
    return _ALPHA


def _leave_out_rates(draft: Draft, frozen: list[Part]) -> None:
    for part in frozen:
        if draft.values.pop(f"training.learning_rates.{part}", None) is not None:
            draft.notes.append(f"The learning rate of the part {part} is left out: its weights are frozen")


def _targets(target: list[str], draft: Draft) -> AdapterTargets | None:
    """Take the layers that get an adapter; return those of a pattern, which says the part as well."""
    if not target or {"all", "all-linear", "auto"} & set(target):
        return None
    patterns = [each for each in target if not re.fullmatch(r"[\w.]+", each)]
    found = targets_of(target[0]) if patterns and len(target) == 1 else None
    if patterns and not found:
        draft.notes.append(
            f"{patterns[0]!r:.80} is a pattern; the adapters are on all linear layers of their parts unless "
            "training.lora.targets names some"
        )
    else:
        draft.values["training.lora.targets"] = list(found.names) if found else target
    return found
