"""axolotl's YAML files. Source: its src/axolotl/utils/schemas and examples for vision-language models."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.given import Given, count, flag, text
from autotune.draft.trainers import renamed, transformers_trainer
from autotune.errors import JobError

TITLE = "axolotl"

_OWN = {"datasets", "micro_batch_size", "sequence_len", "num_epochs", "rl"}
# Where axolotl's defaults, in its schemas and examples, differ from Trainer's.
_DEFAULTS = {
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "save_total_limit": 4,
    "bf16": "auto",
}
_NAMES = {
    "base_model": "model_name_or_path",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "bfloat16": "pure_bf16",
    "float16": "fp16",
    "val_set_size": "evaluation_share",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "lora_model_dir": "adapter_name_or_path",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_init_lora_weights": "init_weights",
    "tokens": "new_special_tokens",
}
KNOWN = {
    *transformers_trainer.TRAINING,
    *transformers_trainer.ADAPTERS,
    *_NAMES,
    *_OWN,
    *("adapter", "lora_target_linear", "freeze_mm_modules", "batch_size", "test_datasets", "saves_per_epoch"),
    *("evals_per_epoch", "processor_type"),
}
_OTHER = ("rl", "reward_model", "process_reward_model", "pretraining_dataset")
"""Arguments of trainings that are not fine-tuning."""
_LOADERS = ("json", "csv", "parquet", "arrow", "text")
"""Paths of data sets that only say how their `data_files` are read."""
_SLICE = re.compile(r"train(?:\[(?::(?P<first>\d+%?)|-(?P<end>\d+%?):)\])?")
_USUAL: dict[str, tuple[object, ...]] = {
    "type": ("chat_template",),
    "field_messages": ("messages", "conversations"),
    "message_property_mappings": ({"role": "role", "content": "content"}, {"role": "from", "content": "value"}),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "roles_to_train": (["assistant"], ["gpt"]),
    "train_on_eos": ("turn",),
}
"""Values of a data set's keys that say what the formats here mean as well."""


def recognises(arguments: Arguments) -> bool:
    """Return whether the model is named as in axolotl, with a key that belongs to a training."""
    return "base_model" in arguments.values and bool(_OWN & arguments.values.keys())


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of axolotl. Raise JobError for an adapter other than LoRA, and for other trainings."""
    given = Given(arguments.values)
    if other := next((name for name in _OTHER if arguments.values.get(name)), None):
        raise JobError(f"{other}: only supervised fine-tuning can be trained here; remove it")
    # An empty value is none, as those that the examples list to be filled in.
    own = {name: value for name, value in renamed(arguments, _NAMES).items() if value is not None}
    found = transformers_trainer.DEFAULTS | _DEFAULTS | _adapters(given) | own
    found["remarks"] = [*_remarks(own)]
    if "warmup_steps" in own and "warmup_ratio" not in own:
        del found["warmup_ratio"]
    if found["bf16"] == "full":
        found["bf16"] = True
    if (whole := given.look("batch_size", count)) and "gradient_accumulation_steps" not in own:
        found["gradient_accumulation_steps"] = max(1, whole // (given.look("micro_batch_size", count) or 1))
    if given.look("lora_target_linear", flag):
        found["lora_target"] = "all-linear"
    if "save_steps" in own:
        found.pop("save_strategy", None)
    if given.look("sample_packing", flag):
        found["pack_tokens"] = own.get("sequence_len")
    if "processor_type" in own and "sequence_len" in own:
        found["sequence_len (it cuts no sample of such a model there)"] = own["sequence_len"]
        del found["sequence_len"]
    # Once in an epoch is what a job does; no evaluation is usual without data for one.
    dropped = {
        name for name, usual in (("saves_per_epoch", (1,)), ("evals_per_epoch", (0, 1))) if own.get(name) in usual
    }
    dropped |= {"adapter", "lora_target_linear", "freeze_mm_modules", "batch_size", "datasets", "test_datasets"}
    found = {name: value for name, value in found.items() if name not in dropped}
    return found | _data(arguments.values, "datasets", "data") | _data(arguments.values, "test_datasets", "evaluation")


def _remarks(own: Mapping[str, Any]) -> Iterator[str]:
    if not {"warmup_steps", "warmup_ratio"} & own.keys():
        yield (
            "Without a warm-up in the configuration, axolotl has one of 3 % of the steps, but of at most 100: give "
            "training.warmup: 100 for a training of more than 3,333 steps"
        )
    if "processor_type" in own and not own.get("train_on_inputs") and not own.get("role_boundaries"):
        yield (
            "The job learns answers alone. With processor_type, axolotl learns prompts as well before its change of "
            "April 2026, and after it for models whose roles it does not know, such as InternVL"
        )


def _adapters(given: Given) -> dict[str, Any]:
    kind = given.look("adapter", text)
    if kind not in (None, "lora", "qlora"):
        raise JobError(f"adapter: {kind} is not supported; give lora, or leave it out to train the weights")
    is_frozen = bool(given.look("freeze_mm_modules", flag))
    return {"finetuning_type": "lora" if kind else "full", "freeze_vision": is_frozen, "freeze_projector": is_frozen}


def _data(values: Mapping[str, Any], key: str, section: str) -> dict[str, Any]:
    """Return the sources under a key, and notes on what they leave open. Raise JobError for no list of data sets."""
    entries = values.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry.get("path") for entry in entries):
        raise JobError(f"{key} is {entries!r:.60}; write a list of data sets, each with a path")
    left = {
        f"{key}[{number}].{name}": value
        for number, entry in enumerate(entries)
        for name, value in entry.items()
        if name not in ("path", "data_files", "ds_type") and value is not None and not _is_usual(name, value)
    }
    return {f"{section}_sources": [source for entry in entries for source in _sources(entry)], **left}


def _is_usual(name: str, value: object) -> bool:
    return bool(_SLICE.fullmatch(str(value))) if name == "split" else value in _USUAL.get(name, ())


def _sources(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sources of a data set: its path, or its files, which are in the repository of a hub id."""
    path, files = str(entry["path"]), entry.get("data_files") or []
    names = [str(name) for name in (files if isinstance(files, list) else [files])]
    if path not in _LOADERS and not Path(path).is_dir():
        names = [f"{path}/{name}" for name in names]
    chosen = _SLICE.fullmatch(str(entry.get("split", "")))
    sampling = next((f"{end}:{part}" for end, part in chosen.groupdict().items() if part), None) if chosen else None
    for name in names or [path]:
        yield {"path": name} | ({"sampling": sampling} if sampling else {})
