"""DeepSpeed's JSON configuration. Source: deepspeed.ai/docs/config-json."""

from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.trainers import renamed
from autotune.errors import JobError

TITLE = "DeepSpeed"

_OWN = {"zero_optimization", "train_micro_batch_size_per_gpu"}
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_NESTED = ("optimizer", "scheduler", "bf16", "fp16")
_NAMES = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size", "gradient_clipping": "max_grad_norm"}
KNOWN = {*_NAMES, *_OWN, *_NESTED, "train_batch_size", "gradient_accumulation_steps"}
_OFFLOADS = ("offload_optimizer", "offload_param")
_OPTIMIZERS = ("adam", "adamw", "fusedadam")


def recognises(arguments: Arguments) -> bool:
    """Return whether it is a document, with keys that only DeepSpeed has."""
    values = arguments.values
    has_sections = any(isinstance(values.get(key), dict) for key in _NESTED)
    is_own = bool(_OWN & values.keys()) or ("train_batch_size" in values and has_sections)
    return is_own and not arguments.words


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the settings of engine, schedule and optimizer. Raise JobError unless that is Adam or AdamW."""
    flat = _optimizer(arguments.values) | _precision(arguments.values)
    flat |= _schedule(arguments.values, flat["learning_rate"])
    zero = _section(arguments.values, "zero_optimization")
    offloaded = {
        name: device for name in _OFFLOADS if (device := _section(zero, name).get("device")) != "none" and device
    }
    flat |= offloaded
    # The script of the training, which is not read, says what is recomputed.
    flat["checkpoint_language"] = flat["checkpoint_vision"] = "of a script that was not read"
    flat["zero_stage"] = zero.get("stage", 0)
    return {name: value for name, value in renamed(arguments, _NAMES).items() if name not in _NESTED} | flat


def _optimizer(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the optimizer. Without a type the script has one of its own."""
    optimizer = _section(values, "optimizer")
    name = optimizer.get("type")
    if name is None:
        return dict.fromkeys(("learning_rate", "adam_beta1", "adam_beta2", "weight_decay"), "auto")
    if str(name).lower() not in _OPTIMIZERS:
        raise JobError(f"optimizer.type: {name} is not supported; AdamW is the optimizer here")
    # Absent parameters have the defaults of torch.optim.Adam, to which DeepSpeed passes the others.
    own: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0} | _section(optimizer, "params")
    learning_rate, betas, decay = own.pop("lr"), own.pop("betas"), own.pop("weight_decay")
    beta1, beta2 = betas if isinstance(betas, list | tuple) and len(betas) == 2 else (betas, betas)
    if str(name).lower() == "adamw":
        own.pop("adam_w_mode", None)  # has an effect for Adam alone
    return {
        "learning_rate": learning_rate,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "weight_decay": decay,
        **{f"optimizer.params.{parameter}": value for parameter, value in own.items()},
    }


def _schedule(values: dict[str, Any], learning_rate: Any) -> dict[str, Any]:
    """Return the settings of the schedule, which may replace the learning rate. Without a type the script has it."""
    scheduler = _section(values, "scheduler")
    if scheduler.get("type") is None:
        return {"lr_scheduler_type": "auto", "warmup_steps": "auto"}
    name = str(scheduler["type"])
    own: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log"} if name in _SCHEDULES else {}
    own |= _section(scheduler, "params")
    if name == "WarmupDecayLR":
        learning_rate = own.pop("warmup_max_lr", 1e-3)
    elif name == "WarmupLR" and "warmup_max_lr" in own:
        learning_rate = own.pop("warmup_max_lr")
    elif name == "WarmupLR":
        own["warmup_max_lr"] = "not given, and 0.001 in older versions whatever optimizer.params.lr is"
    return {
        # Other schedules have rates of their own.
        "learning_rate": learning_rate if name in _SCHEDULES else "auto",
        "lr_scheduler_type": _SCHEDULES.get(name, name),
        "warmup_steps": own.pop("warmup_num_steps", 0),
        "max_steps": own.pop("total_num_steps", None),
        **{f"scheduler.params.{parameter}": value for parameter, value in own.items()},
    }


def _precision(values: dict[str, Any]) -> dict[str, Any]:
    """Return what the layers compute in. Without either section that is what the script makes the weights."""
    given = [key for key in ("bf16", "fp16") if key in values]
    return {key: _section(values, key).get("enabled", False) for key in given} or {"bf16": "auto"}


def _section(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object under a key, empty where there is none. Raise JobError for another value."""
    section = values.get(key, {})
    if not isinstance(section, dict):
        raise JobError(f"{key} is {section!r:.40}; write an object, or remove it")
    return section
