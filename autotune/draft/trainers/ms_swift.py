"""ms-swift: `swift sft` and its YAML files. Source: swift.readthedocs.io, "Command Line Parameters"."""

from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.given import Given, flag, texts
from autotune.draft.nearest import nearest
from autotune.draft.trainers import renamed, transformers_trainer
from autotune.errors import JobError

TITLE = "ms-swift"

LORA_DEFAULTS = {
    "lora_rank": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target": "all-linear",
    "freeze_vision": True,
    "freeze_projector": True,
}
"""Defaults of adapters and frozen parts."""
# Where ms-swift's defaults, in the list named above, differ from Trainer's.
_DEFAULTS = {
    **LORA_DEFAULTS,
    "finetuning_type": "lora",
    "dtype": "auto",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": None,
    "least_batch_samples": 16,  # reached by accumulation where gradient_accumulation_steps is not set
    "save_steps": 500,
}
_FULL_LEARNING_RATE, _LEARNING_RATE = 1e-5, 1e-4
NAMES = {
    "model": "model_name_or_path",
    "train_type": "finetuning_type",
    "tuner_type": "finetuning_type",
    "sft_type": "finetuning_type",
    "torch_dtype": "dtype",
    "dataset": "data_path",
    "val_dataset": "evaluation_path",
    "split_dataset_ratio": "evaluation_share",
    "freeze_vit": "freeze_vision",
    "freeze_aligner": "freeze_projector",
    "freeze_llm": "freeze_language",
    "vit_lr": "vision_lr",
    "aligner_lr": "projector_lr",
    "target_modules": "lora_target",
}
KNOWN = {
    *transformers_trainer.TRAINING,
    *transformers_trainer.ADAPTERS,
    *NAMES,
    "lora_rank",
    "target_regex",
    "task_type",
}
VARIABLES = {
    *(f"{kind}{end}_PIXELS" for kind in ("", "VIDEO_") for end in ("MAX", "MIN")),
    *(f"{kind}_{end}_TOKEN_NUM" for kind in ("IMAGE", "VIDEO") for end in ("MAX", "MIN")),
    *("VIDEO_TOTAL_PIXELS", "FPS", "NFRAMES", "FPS_MAX_FRAMES", "FPS_MIN_FRAMES", "NUM_FRAMES", "MAX_NUM_FRAMES"),
    *("IMAGE_FACTOR", "FRAME_FACTOR", "SPATIAL_MERGE_SIZE", "MAX_RATIO", "QWENVL_BBOX_FORMAT"),
    *("MAX_NUM", "VIDEO_MAX_NUM", "INPUT_SIZE", "VIDEO_SEGMENTS", "MAX_SLICE_NUMS", "VIDEO_MAX_SLICE_NUMS"),
    *("MAX_PARTITION", "HD_NUM", "NUM_CROPS", "SAMPLING_RATE", "USE_AUDIO_IN_VIDEO", "ENABLE_AUDIO_OUTPUT"),
}
"""Variables in place of `model_kwargs`, from "Specific Model Arguments" of the list named above."""
_IMAGES = "ROOT_IMAGE_DIR"


def recognises(arguments: Arguments) -> bool:
    """Return whether `swift` is run, or arguments that only ms-swift has are among them."""
    own = {"train_type", "tuner_type", "freeze_vit", "freeze_aligner", "split_dataset_ratio"}
    return "swift" in arguments.words or bool(own & set(arguments.values))


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of Trainer and of ms-swift. Raise JobError for a task other than fine-tuning."""
    task = arguments.values.get("task_type", "causal_lm")
    if task != "causal_lm" or {"rlhf", "rlhf_type"} & (arguments.words | set(arguments.values)):
        raise JobError("only supervised fine-tuning (`swift sft` with task_type: causal_lm) can be trained here")
    for name in ("train_type", "tuner_type", "sft_type"):
        if (kind := arguments.values.get(name, "full")) not in ("full", "lora"):
            raise JobError(f"{name}: {kind} is not supported; give full or lora")
    check_whole(arguments)
    found: dict[str, Any] = transformers_trainer.DEFAULTS | _DEFAULTS | renamed(arguments, NAMES)
    take_environment(found, arguments)
    take_pattern(found)
    if found["finetuning_type"] == "lora" and not {"all-linear", "auto"} & set(
        Given(found).look("lora_target", texts) or ["auto"]
    ):
        found["adapts_all_parts"] = True
    if "learning_rate" not in arguments.values:
        found["learning_rate"] = learning_rate(found)
    if found.get("save_strategy", "steps") == "steps":
        found.setdefault("eval_steps", found["save_steps"])
    if "average_tokens_across_devices" not in arguments.values:
        found["remarks"] += [
            "The loss is the mean over all target tokens of a step; before ms-swift 4 it is the mean of those of the "
            "devices unless average_tokens_across_devices is true"
        ]
    return found | present(found)


def check_whole(arguments: Arguments) -> None:
    """Raise JobError for arguments that are in a file."""
    if file := arguments.values.get("config"):
        raise JobError(f"config: {file} has further arguments, which are not read; write all into one file or command")


def take_pattern(settings: dict[str, Any]) -> None:
    """Put the pattern of the layers with an adapter, if there is one, in place of their names."""
    if isinstance(settings.get("target_regex"), str):
        settings["lora_target"] = [settings.pop("target_regex")]


def present(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the length of packs and the checkpointing, which is on by default, for the tower as for the rest."""
    given = Given(settings)
    tokens = settings.get("packing_length") or settings.get("max_length")
    language = settings.get("gradient_checkpointing", True)
    of_vision = settings.get("vit_gradient_checkpointing")
    checkpointed = {"checkpoint_language": language, "checkpoint_vision": language if of_vision is None else of_vision}
    return checkpointed | ({"pack_tokens": tokens} if given.look("packing", flag) else {})


def take_environment(settings: dict[str, Any], arguments: Arguments) -> None:
    """Add what variables of a script or of a configuration's `ENV` set: the folder of images, limits, and frames.

    `remarks` has those with nearly the name of one of these.
    """
    own = settings.pop("ENV") if isinstance(settings.get("ENV"), dict) else {}
    variables = {**arguments.passed, **{str(name): value for name, value in own.items()}}
    for name in sorted(VARIABLES & variables.keys()):
        settings.setdefault(name.lower(), variables[name])
    if folder := variables.get(_IMAGES):
        settings["images"] = folder
    known = VARIABLES | {_IMAGES}
    meant = {name: other for name in sorted({*variables} - known) if (other := nearest(name, known, variables))}
    settings["remarks"] = [
        f"{name} is no variable of {TITLE}, and so not taken over: did you mean {other}?"
        for name, other in meant.items()
    ]
    rest = {name: value for name, value in variables.items() if name not in {*known, *meant, *arguments.passed}}
    if rest:
        settings["ENV"] = rest


def learning_rate(settings: dict[str, Any]) -> float:
    """Return the default for the way in which the model is tuned."""
    return _FULL_LEARNING_RATE if settings["finetuning_type"] == "full" else _LEARNING_RATE
