"""LLaMA-Factory's YAML files and `llamafactory-cli train`. Source: its src/llamafactory/hparams."""

from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.given import Given, flag, texts
from autotune.draft.trainers import renamed, transformers_trainer
from autotune.errors import JobError

TITLE = "LLaMA-Factory"

# Where LLaMA-Factory's defaults, in its hparams, differ from Trainer's.
_DEFAULTS = {
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_alpha_of_rank": 2,
    "lora_target": "all",
    "freeze_vision": True,
    "freeze_projector": True,
    "cut_to": 2048,
    "averages_micro_batches": True,
    "image_max_pixels": 768 * 768,
    "video_max_pixels": 256 * 256,
    "dataset_dir": "data",
}
NAMES = {
    "freeze_vision_tower": "freeze_vision",
    "freeze_multi_modal_projector": "freeze_projector",
    "freeze_language_model": "freeze_language",
    "cutoff_len": "cut_to",
    "val_size": "evaluation_share",
    "dataset": "dataset_names",
    "eval_dataset": "evaluation_names",
    "media_dir": "images",
}
KNOWN = {
    *transformers_trainer.TRAINING,
    *transformers_trainer.ADAPTERS,
    *NAMES,
    *("stage", "finetuning_type", "lora_rank", "lora_target", "dataset_dir", "pure_bf16"),
}


def recognises(arguments: Arguments) -> bool:
    """Return whether arguments that only LLaMA-Factory has are among them."""
    return "llamafactory-cli" in arguments.words or bool({"finetuning_type", "cutoff_len"} & set(arguments.values))


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of Trainer and of LLaMA-Factory. Raise JobError for a stage other than fine-tuning."""
    stage = arguments.values.get("stage", "sft")
    if stage != "sft":
        raise JobError(f"stage: {stage} is not supported, only supervised fine-tuning is; give stage: sft")
    found = transformers_trainer.DEFAULTS | _DEFAULTS | renamed(arguments, NAMES)
    given = Given(found)
    if found["finetuning_type"] != "lora" and given.take("train_mm_proj_only", flag):
        found |= {"freeze_vision": True, "freeze_projector": False, "freeze_language": True}
        del found["train_mm_proj_only"]
    if found["finetuning_type"] == "lora" and given.look("lora_target", texts) == ["all"]:
        found["freeze_projector"] = True  # all linear layers but those of the projector
    # Without `neat_packing`, the samples of a pack attend to each other, as in no plan.
    packs = {"pack_tokens": found["cut_to"], "packs_are_apart": given.look("neat_packing", flag) or False}
    return found | packs | {"checkpoint_language": not given.look("disable_gradient_checkpointing", flag)}
