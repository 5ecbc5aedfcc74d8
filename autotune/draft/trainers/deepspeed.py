"""DeepSpeed's JSON configuration. Source: deepspeed.ai/docs/config-json."""

from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.trainers import renamed
from autotune.errors import JobError

TITLE = "DeepSpeed"

_OWN = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_NESTED = ("optimizer", "scheduler", "bf16", "fp16")
_NAMES = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size", "gradient_clipping": "max_grad_norm"}
_OFFLOADS = ("offload_optimizer", "offload_param")
_OPTIMIZERS = ("adam", "adamw", "fusedadam")


def recognises(arguments: Arguments) -> bool:
    """Return whether keys that only DeepSpeed has are among the arguments."""
    return bool(_OWN & set(arguments.values))


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the settings of engine, schedule and optimizer. Raise JobError unless that is Adam or AdamW."""
    optimizer, scheduler, bf16, fp16 = (_section(arguments.values, key) for key in _NESTED)
    name = optimizer.get("type", "AdamW")
    if str(name).lower() not in _OPTIMIZERS:
        raise JobError(f"optimizer.type: {name} is not supported; AdamW is the optimizer here")
    own, schedule = _section(optimizer, "params"), _section(scheduler, "params")
    betas = own.get("betas", (0.9, 0.999))
    beta1, beta2 = betas if isinstance(betas, list | tuple) and len(betas) == 2 else (betas, betas)
    flat = {
        # Absent parameters have the defaults of torch.optim.Adam, to which DeepSpeed passes the others.
        "learning_rate": own.get("lr", 1e-3),
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "weight_decay": own.get("weight_decay", 0.0),
        "lr_scheduler_type": _SCHEDULES.get(str(scheduler.get("type")), "constant"),
        "warmup_steps": schedule.get("warmup_num_steps", 0),
        "max_steps": schedule.get("total_num_steps"),
        "bf16": bf16.get("enabled", False),
        "fp16": fp16.get("enabled", False),
    }
    zero = _section(arguments.values, "zero_optimization")
    offloaded = {
        name: device for name in _OFFLOADS if (device := _section(zero, name).get("device")) != "none" and device
    }
    flat |= offloaded
    # The script of the training, which is not read, says what is recomputed.
    flat["checkpoint_language"] = flat["checkpoint_vision"] = "of a script that was not read"
    flat["zero_stage"] = zero.get("stage", 0)
    return {name: value for name, value in renamed(arguments, _NAMES).items() if name not in _NESTED} | flat


def _section(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object under a key, empty where there is none. Raise JobError for another value."""
    section = values.get(key, {})
    if not isinstance(section, dict):
        raise JobError(f"{key} is {section!r:.40}; write an object, or remove it")
    return section
