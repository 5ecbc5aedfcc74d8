"""TRL's SFTTrainer: `trl sft`, its sft.py and sft_vlm.py. Sources: TRL's SFTConfig and ModelConfig."""

from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.given import Given, flag, text
from autotune.draft.trainers import renamed, transformers_trainer

TITLE = "TRL"

_DEFAULTS = {
    "learning_rate": 2e-5,
    "cut_to": 1024,
    "lora_enable": False,
    "lora_rank": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target": ["q_proj", "v_proj"],
    "assistant_only_loss": False,
}
_NAMES = {
    "use_peft": "lora_enable",
    "dataset_name": "data_path",
    "dataset_path": "data_path",
    "max_length": "cut_to",
    "lora_target_modules": "lora_target",
}
KNOWN = {*transformers_trainer.KNOWN, *_NAMES, "packing_strategy"}


def recognises(arguments: Arguments) -> bool:
    """Return whether TRL is run, or arguments that only it has are among them."""
    is_document = not arguments.words and "dataset_name" in arguments.values
    is_run = arguments.starts("trl", "sft", "sft_vlm") or is_document or "use_peft" in arguments.values
    return is_run and "model_name_or_path" in arguments.values


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of Trainer and of TRL, which computes in bfloat16, and learns prompts by default."""
    found = transformers_trainer.DEFAULTS | _DEFAULTS | renamed(arguments, transformers_trainer.NAMES | _NAMES)
    if Given(arguments.values).look("completion_only_loss", flag):  # then the data are prompts with completions
        del found["assistant_only_loss"]
    found["checkpoint_language"] = found.get("gradient_checkpointing", True)
    given = Given(found)
    if given.look("packing", flag) and given.look("packing_strategy", text) != "wrapped":  # which cuts samples
        found["pack_tokens"] = found["cut_to"]
    return {"bf16": str(found.get("fp16", "false")).lower() != "true"} | found
