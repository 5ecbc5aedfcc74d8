"""Megatron-SWIFT: `megatron sft`. Source: swift.readthedocs.io, "Megatron-SWIFT Command Line Parameters"."""

from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.given import Given, flag
from autotune.draft.trainers import ms_swift, renamed
from autotune.errors import JobError

TITLE = "Megatron-SWIFT"

_OWN = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "lr_warmup_fraction"}
# From the list of parameters named above. Trainer has no part in Megatron-SWIFT, so none of its defaults hold.
_DEFAULTS = {
    **ms_swift.LORA_DEFAULTS,
    "finetuning_type": "full",
    "train_batch_size": 16,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "seed": 42,
    "per_device_train_batch_size": 1,
}
_NAMES = {
    "lr": "learning_rate",
    "micro_batch_size": "per_device_train_batch_size",
    "global_batch_size": "train_batch_size",
    "lr_decay_style": "lr_scheduler_type",
    "lr_warmup_fraction": "warmup_ratio",
    "lr_warmup_iters": "warmup_steps",
    "clip_grad": "max_grad_norm",
    "train_iters": "max_steps",
    "max_epochs": "num_train_epochs",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "save": "output_dir",
}
KNOWN = {
    *ms_swift.NAMES,
    *_NAMES,
    *_OWN,
    *("weight_decay", "adam_beta1", "adam_beta2", "seed", "bf16", "fp16", "dataloader_num_workers"),
    *("lora_rank", "lora_alpha", "lora_dropout", "target_regex", "use_distributed_optimizer"),
}


def recognises(arguments: Arguments) -> bool:
    """Return whether `megatron sft` is run, or ms-swift's arguments have Megatron's among them."""
    is_swift = {"model", "mcore_model"} & arguments.values.keys() and "dataset" in arguments.values
    return arguments.starts("megatron") or bool(is_swift and _OWN & arguments.values.keys())


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments by common names. Raise JobError for a task other than fine-tuning."""
    if {"rlhf", "pt"} & arguments.words:
        raise JobError("only supervised fine-tuning (`megatron sft`) can be trained here")
    found = _DEFAULTS | renamed(arguments, ms_swift.NAMES | _NAMES)
    ms_swift.take_environment(found, arguments)
    ms_swift.check_whole(arguments)
    ms_swift.take_pattern(found)
    if not {"dtype", "fp16", "bf16"} & found.keys():
        found["bf16"] = True
    if "learning_rate" not in found:
        found["learning_rate"] = ms_swift.learning_rate(found)
    return found | ms_swift.present(found) | _present(found)


def _present(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpointing, of parts of a layer by default, and the ZeRO stage of its distributed optimizer."""
    granularity = str(settings.get("recompute_granularity", "selective"))
    each = settings.get("recompute_method") == "uniform" and str(settings.get("recompute_num_layers", 1)) == "1"
    known = {"none": False} | ({"full": True} if each else {})
    checkpointed = known.get(granularity, f"recompute_granularity {granularity}")
    is_shared = Given(settings).look("use_distributed_optimizer", flag)
    return {"checkpoint_language": checkpointed, "zero_stage": 0 if is_shared is False else 1}
