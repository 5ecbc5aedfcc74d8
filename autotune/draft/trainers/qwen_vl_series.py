"""2U1's fine-tuning of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Source: src/params.py, src/train/train_sft.py and scripts of github.com/2U1/Qwen-VL-Series-Finetune.
"""

from typing import Any

from autotune.draft.arguments import Arguments, whole_number
from autotune.draft.given import Given, flag
from autotune.draft.trainers import renamed, transformers_trainer
from autotune.errors import JobError

TITLE = "Qwen-VL-Series-Finetune"

_OWN = {"freeze_merger", "tune_merger", "freeze_vision_tower", "vision_lora", "lora_namespan_exclude", "image_folder"}
_OF_OTHERS = {
    "freeze_projector",
    "tune_projector",
    "projector_lr",
    "tune_img_projector",
    "freeze_connector",
    "connector_lr",
}
"""Arguments of scripts of the same author for other models, whose parts are others."""
# Defaults of the dataclasses in src/params.py that Trainer lacks or has otherwise.
_DEFAULTS = {
    "model_name_or_path": "Qwen/Qwen2-VL-7B-Instruct",
    "lora_enable": False,
    "lora_rank": 64,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "image_min_pixels": 3136,
    "image_max_pixels": 12845056,
    "video_min_pixels": 100352,
    "video_max_pixels": 602112,
}
_NAMES = {
    **transformers_trainer.NAMES,
    "model_id": "model_name_or_path",
    "eval_path": "evaluation_path",
    "eval_image_folder": "evaluation_images",
    "freeze_merger": "freeze_projector",
    "tune_merger": "tune_projector",  # of older versions
    "max_seq_length": "max_seq_length (it cuts no sample there)",
}
KNOWN = {*transformers_trainer.KNOWN, *_NAMES, *_OWN}
_OUTER = {"embed_tokens", "lm_head"}
"""Modules that have adapters there unless `lora_namespan_exclude` names them, and never here."""


def recognises(arguments: Arguments) -> bool:
    """Return whether the model is named as there, and an argument that only these scripts have is among them."""
    given = arguments.values.keys()
    return "model_id" in given and bool(_OWN & given) and not _OF_OTHERS & given


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of Trainer and of these scripts. Raise JobError for what they refuse, and a classifier."""
    if arguments.starts("train_cls"):
        raise JobError("train_cls trains a classifier; only supervised fine-tuning (train_sft) can be trained here")
    found = transformers_trainer.DEFAULTS | _DEFAULTS | renamed(arguments, _NAMES)
    # The scripts compute the accumulation steps with it; deepspeed starts a process for each device.
    found["processes"] = whole_number(arguments.environment.get("NUM_DEVICES"))
    given = Given(found)
    if given.look("lora_enable", flag):
        left_out, adapters = {"vision_lora", "tune_projector"}, _adapters(given)
    else:
        left_out, adapters = {"lora_namespan_exclude", "num_lora_modules"}, {}
    return {name: value for name, value in found.items() if name not in left_out} | adapters


def _adapters(given: Given) -> dict[str, Any]:
    """Return what trains with adapters, which the language model has, and the tower with `vision_lora`.

    Raise JobError for adapters in a tower whose own weights train.
    """
    in_vision = bool(given.look("vision_lora", flag))
    trains_vision = not given.look("freeze_vision", flag)
    if in_vision and trains_vision:
        raise JobError("vision_lora: with it, freeze_vision_tower has to be True; set it, or remove vision_lora")
    is_frozen = given.look("freeze_projector", flag) or given.look("tune_projector", flag) is False
    # The merger is a part of the tower there: it thaws with it, and has adapters where it has.
    trains_projector = trains_vision or not is_frozen
    return {
        "freeze_vision": not in_vision,
        "freeze_projector": trains_projector or not in_vision,
        "freeze_language": False,
        "lora_train_projector": trains_projector,
        "lora_train_vision": trains_vision,
        "lora_namespan_exclude": _otherwise_excluded(given, in_vision),
    }


def _otherwise_excluded(given: Given, in_vision: bool) -> str | None:
    """Return what `lora_namespan_exclude` leaves out, None where that is what has no adapters here either."""
    excluded = given.look("lora_namespan_exclude", _names) or []
    others = [
        name for name in excluded if not any(name in outer for outer in _OUTER) and (in_vision or name != "visual")
    ]
    is_usual = not others and all(any(name in outer for name in excluded) for outer in _OUTER)
    return None if is_usual else f"[{', '.join(excluded)}], where {' and '.join(sorted(_OUTER))} are left out here"


def _names(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{value!r:.60} is not a list of names; write one such as ['lm_head']")
    return value
