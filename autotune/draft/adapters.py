"""Adapters and frozen parts of a job from the arguments of another trainer."""

import re

from autotune.draft.draft import Draft
from autotune.draft.given import Given, count, flag, number, text, texts
from autotune.draft.target_pattern import AdapterTargets, targets_of
from autotune.errors import JobError
from trials.job import PARTS
from trials.workload import Part

_RANK = 8
"""Default rank, as in peft."""


def take_adapters(given: Given, draft: Draft) -> None:
    """Take what is trained: adapters, or the weights of parts. Raise JobError for another way to tune a model."""
    kind, rank = given.take("finetuning_type", text), given.take("lora_rank", count)
    enabled = given.take("lora_enable", flag)
    if kind not in (None, "full", "lora"):
        raise JobError(f"finetuning_type: {kind} is not supported; give full or lora")
    frozen = [part for part in PARTS if given.take(f"freeze_{part}", flag) or given.take(f"tune_{part}", flag) is False]
    alpha, dropout, target = (
        given.take("lora_alpha", number),
        given.take("lora_dropout", number),
        given.take("lora_target", texts),
    )
    trains_projector, trains_vision = (given.take(f"lora_train_{part}", flag) for part in ("projector", "vision"))
    if not (kind == "lora" or enabled or (kind is None and rank and enabled is None)):
        _leave_out_rates(draft, frozen)
        if frozen:
            draft.values["training.freeze"] = frozen
        return
    if rank is None:
        draft.notes.append(f"The rank of the adapters is not given; training.lora.rank is {_RANK}, the default of peft")
    targets = _targets(target or [], draft)
    # InternVL's scripts freeze the language model's own weights where it has adapters.
    parts = [targets.part] if targets else [part for part in PARTS if part not in frozen] or ["language"]
    # Without an alpha, LLaMA-Factory takes twice the rank.
    rank = rank or _RANK
    draft.values |= {
        "training.lora.rank": rank,
        "training.lora.alpha": int(alpha or 2 * rank),
        "training.lora.parts": parts,
    }
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
