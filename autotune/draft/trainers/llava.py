"""LLaVA's and LLaVA-NeXT's scripts. Sources: their llava/train/train.py."""

from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.given import Given, flag, texts
from autotune.draft.trainers import renamed, transformers_trainer

TITLE = "LLaVA"

_OWN = {"mm_projector_type", "mm_vision_select_layer", "tune_mm_mlp_adapter", "mm_tunable_parts"}
# Defaults of the dataclasses in LLaVA's train.py that Trainer lacks; `cut_to` is its `model_max_length`.
_DEFAULTS = {"lora_enable": False, "lora_rank": 64, "lora_alpha": 16, "lora_dropout": 0.05, "cut_to": 512}
_PARTS = {"vision": "mm_vision_tower", "projector": "mm_mlp_adapter", "language": "mm_language_model"}
"""Name in `mm_tunable_parts` by part."""
_TAKEN = {"mm_tunable_parts", "tune_mm_mlp_adapter", "freeze_mm_mlp_adapter", "unfreeze_mm_vision_tower"}
"""Arguments that say what is trained."""
KNOWN = {*transformers_trainer.KNOWN, *_OWN, *_TAKEN}


def recognises(arguments: Arguments) -> bool:
    """Return whether arguments that only LLaVA's scripts have are among them."""
    return bool(_OWN & set(arguments.values))


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of Trainer and of LLaVA, which freezes the vision tower by default."""
    given = Given(arguments.values)
    found = transformers_trainer.DEFAULTS | _DEFAULTS | renamed(arguments, transformers_trainer.NAMES)
    trained = _trained(given)
    if given.take("lora_enable", flag):
        # Adapters are in the language model; the projector trains its own weights, the vision tower nothing.
        found["lora_train_projector"] = not given.take("freeze_mm_mlp_adapter", flag)
        trained = {"language"}
    frozen = {f"freeze_{part}": part not in trained for part in _PARTS}
    return {name: value for name, value in found.items() if name not in _TAKEN} | frozen


def _trained(given: Given) -> set[str]:
    """Return the parts that are trained without adapters."""
    if named := given.take("mm_tunable_parts", texts):
        return {part for part, name in _PARTS.items() if name in named}
    if given.take("tune_mm_mlp_adapter", flag):
        return {"projector"}
    is_trained = {
        "vision": given.take("unfreeze_mm_vision_tower", flag),
        "projector": not given.take("freeze_mm_mlp_adapter", flag),
        "language": not given.take("freeze_backbone", flag),
    }
    return {part for part, trains in is_trained.items() if trains}
