"""The fine-tuning of Qwen-VL. Source: qwenvl/train in its qwen-vl-finetune."""

from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.trainers import renamed, transformers_trainer

TITLE = "Qwen-VL's qwen-vl-finetune"

_DEFAULTS = {
    "tune_vision": False,
    "tune_projector": False,
    "tune_language": False,
    "averages_micro_batches": True,
    "lora_rank": 64,
    "lora_alpha": 128,
    "lora_dropout": 0.05,
    "lora_target": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
KNOWN = transformers_trainer.KNOWN


def recognises(arguments: Arguments) -> bool:
    """Return whether the argument that names its data sets is among them."""
    return "dataset_use" in arguments.values


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of Trainer and of Qwen-VL, which freezes all parts by default."""
    # Data sets alone are read; with them, `data_path` is an argument of a fork.
    names = {
        **transformers_trainer.NAMES,
        "data_path": "data_path (dataset_use replaces it)",
        "model_max_length": "model_max_length (it cuts no sample there)",
    }
    if not arguments.values.get("mm_projector_lr"):
        names["vision_tower_lr"] = "vision_tower_lr (it has no effect there without mm_projector_lr)"
    found = transformers_trainer.DEFAULTS | _DEFAULTS | renamed(arguments, names)
    if str(arguments.values.get("lora_enable", "false")).lower() == "true":
        # Only layers of the language model have the names in `lora_target`; the `tune_` arguments have no effect.
        found |= {"tune_vision": False, "tune_projector": False, "tune_language": True}
    return found | {"lora_enable": found.get("lora_enable", False)}
