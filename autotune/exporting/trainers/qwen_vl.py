"""Qwen-VL's qwen-vl-finetune: a launch script. Source: qwenvl/data and qwenvl/train of Qwen3-VL's repository."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.draft.trainers import qwen_vl as reader
from autotune.draft.trainers.transformers_trainer import NAMES
from autotune.errors import ExportError
from autotune.exporting.conversations import Media, checked_sample, human_and_gpt, numbered
from autotune.exporting.counting.counted import Counted, count_by_processor
from autotune.exporting.image_limits import image_limits
from autotune.exporting.settings import check_mergers, learning_left_out, tuned
from autotune.exporting.trainers import (
    Export,
    kept_of,
    launch_script,
    own_settings,
    zero_configuration,
)
from autotune.exporting.video_arguments import VideoArguments
from autotune.search.space.abilities import Abilities
from trials.data.records.sample import IMAGE, Sample
from trials.job import Job
from trials.plan import Padded

TITLE = reader.TITLE
STARTS_IN = "qwen-vl-finetune of its repository"
READER = reader

_DATA, _ZERO, _SCRIPT, _REGISTERED = "train.json", "zero.json", "sft.sh", "data_dict.py"
ARGUMENTS = (
    *("model_name_or_path", "bf16", "learning_rate", "vision_tower_lr", "mm_projector_lr", "weight_decay"),
    *("adam_beta1", "adam_beta2", "max_grad_norm", "lr_scheduler_type", "warmup_ratio", "warmup_steps"),
    *("num_train_epochs", "max_steps", "seed", "dataloader_num_workers", "output_dir"),
    *("save_strategy", "save_steps", "save_total_limit"),
    *("tune_mm_vision", "tune_mm_mlp", "tune_mm_llm", "lora_enable", "lora_r", "lora_alpha", "lora_dropout"),
)
"""Arguments that a job decides."""
DROPPED = (
    *("data_packing", "data_flatten", "deepspeed", "data_path", "eval_strategy", "group_by_modality_length"),
    *("resume_from_checkpoint", "group_by_length", "fp16"),
)
VARIABLES: frozenset[str] = frozenset()
_VIDEOS = VideoArguments(
    names={
        "fps": "video_fps",
        "min_frames": "video_min_frames",
        "max_frames": "video_max_frames",
        "min_pixels": "video_min_pixels",
        "max_pixels": "video_max_pixels",
    },
    bounds_all=True,
)
"""It sets them in the model's own processor (`update_processor_pixels` in qwenvl/data/data_processor.py)."""
_NO_DROPOUT = 1e-9
"""Chance of dropping an input of an adapter, as good as none: it takes 0 for its default of 0.05."""
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
REMEDY = "take white space around images out of the questions, and save the model's own chat template in its folder"


def check(job: Job, family: str) -> None:
    """Raise ExportError for a model of another family, float32, and what would be trained otherwise there."""
    check_mergers(job, family, TITLE)
    if not family.startswith("qwen"):
        raise ExportError(
            f"{TITLE} trains Qwen's models alone, and this is a model of type {family}; export to ms-swift"
        )
    if (loaded := _loaded_as(job.model.path)) != family:
        raise ExportError(
            f"model.path: {TITLE} chooses the class of the model by its name, and would load {job.model.path} as "
            f"{loaded} and not as {family}; rename the folder like the published models, such as Qwen2.5-VL-7B-Instruct"
        )
    if job.model.dtype == "float32":
        raise ExportError(
            f"model.dtype: float32, which the attention of {TITLE}, FlashAttention, does not take; set bfloat16, or "
            "export to ms-swift"
        )
    if job.training.lora.rank is not None and job.training.lora.parts != ("language",):
        raise ExportError(
            f"training.lora.parts: {', '.join(job.training.lora.parts)}; {TITLE} has adapters in the language model "
            "alone; export to ms-swift"
        )


def _loaded_as(path: str) -> str:
    """Return the `model_type` of the class that its train_qwen.py loads."""
    whole, name = path.lower(), Path(path).name.lower()
    if "qwen3" in whole:
        return "qwen3_vl_moe" if "a" in name else "qwen3_vl"
    return "qwen2_5_vl" if "qwen2.5" in whole else "qwen2_vl"


def abilities(job: Job) -> Abilities:  # noqa: ARG001 - the same for every job
    """Return the limits of its plans."""
    return Abilities(packs="in any order")


def write(export: Export, folder: Path) -> None:
    """Write the data as a list of packs or samples, the launch script, and DeepSpeed's configuration."""
    media, index = Media(folder=folder, prefix=export.folder), export.epoch.index
    packs = [
        [human_and_gpt(index, row, media, "image", "video") for row in export.epoch.packs.pack(int(pack)).tolist()]
        for pack in numbered(export.epoch)
    ]
    items = [sample for pack in packs for sample in pack] if _pads(export) else packs
    (folder / _DATA).write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    if export.held.plan.layout.zero:
        zero = json.dumps(zero_configuration(export.held.plan.layout.zero), indent=2)
        (folder / _ZERO).write_text(f"{zero}\n", encoding="utf-8")
    registered = {"annotation_path": str(export.folder / _DATA), "data_path": ""}
    (folder / _REGISTERED).write_text(f"data_dict[{_name(export)!r}] = {registered!r}\n", encoding="utf-8")
    script = launch_script(export, "qwenvl/train/train_qwen.py", _arguments(export))
    (folder / _SCRIPT).write_text(script, encoding="utf-8")


def count(export: Export, rows: Sequence[int], folder: Path) -> Counted:  # noqa: ARG001 - writes none
    """Count tokens with the model's own processor by the rules of its data_processor.py."""
    samples = [_stripped(checked_sample(export.epoch.index, row)) for row in rows]
    why_not = "it is no package; its published rules were followed"
    return count_by_processor(samples, export.job.model, why_not=why_not)


def _stripped(sample: Sample) -> Sample:
    """Return a sample without the white space around images and texts of questions, which it strips."""
    turns = [
        replace(turn, text=IMAGE.join(part.strip() for part in turn.text.split(IMAGE))) if turn.role == "user" else turn
        for turn in sample.turns
    ]
    return replace(sample, turns=tuple(turns))


def _pads(export: Export) -> bool:
    return isinstance(export.held.plan.packing, Padded)


def _name(export: Export) -> str:
    return export.folder.name.replace("-", "_").replace("%", "_")


def decided(export: Export) -> dict[str, Any]:
    """Return the arguments for the plan, the data and the settings of the job."""
    packing = export.held.plan.packing
    common = export.settings | tuned(export.job)
    limits = image_limits(export.job.model.path)
    found = own_settings(common, NAMES, ARGUMENTS) | {
        "output_dir": str(export.output),
        "dataset_use": _name(export),
        "data_packing": not _pads(export),
        "data_flatten": not _pads(export),  # which some versions ask for with packs
        "per_device_train_batch_size": packing.samples if isinstance(packing, Padded) else 1,
        "gradient_accumulation_steps": export.epoch.micro_batches,
        "model_max_length": export.cut_length,
        "gradient_checkpointing": export.recomputes[1],
        "eval_strategy": "no",
    }
    found |= {name: limits[name] for name in ("max_pixels", "min_pixels") if name in limits}
    found |= _VIDEOS.settings(export.videos)
    if {"vision_tower_lr", "mm_projector_lr"} & found.keys():  # which it follows where the latter is given alone
        training = export.job.training
        found.setdefault("vision_tower_lr", training.learning_rate_of("vision"))
        found.setdefault("mm_projector_lr", training.learning_rate_of("projector"))
    if "lora_dropout" in found:
        found["lora_dropout"] = found["lora_dropout"] or _NO_DROPOUT
    if export.held.plan.layout.zero:
        found["deepspeed"] = str(export.folder / _ZERO)
    return found


def _arguments(export: Export) -> dict[str, Any]:
    found = decided(export)
    return found | kept_of(export.present, {*found, *ARGUMENTS, *DROPPED}, NAMES)


def command(export: Export) -> str:
    """Return the command, whose script is in the exported folder."""
    return f"bash {shlex.quote(str(export.folder / _SCRIPT))}"


def left_out(export: Export) -> Iterator[str]:
    """Yield what its data and its settings do not hold."""
    yield from learning_left_out(export.job, export.epoch.micro_batches * export.devices)
    yield "the order of the packs, so that samples of a step are others, and ranks wait for each other"
    if (rest := len(export.epoch.packs) % export.devices) and not _pads(export):
        yield f"{rest} packs at the end of each epoch"
    if export.held_out is not None:
        yield "evaluation: held-out samples are left out of the data, and not evaluated on there"
    targets = export.job.training.lora.targets
    if export.job.training.lora.rank is not None and tuple(targets or ()) != _TARGETS:
        yield f"training.lora.targets: adapters are on {', '.join(_TARGETS)} there"
    if export.cuts_at is not None and not _pads(export):
        yield "data.oversize: truncate; longer samples are not cut in packs there"


def notes(export: Export) -> Iterator[str]:
    """Yield what to do before, and what packs need."""
    if export.videos and not export.videos.samples:
        yield (
            f"WARNING: do_sample_frames is not true in {export.videos.file}, without which transformers shows every "
            f"frame of a video there: {export.filmed}, those with videos, would be far longer; set it to true, which "
            "changes nothing in autotune"
        )
    yield f"First add {export.folder / _REGISTERED} to qwenvl/data/__init__.py there"
    if not _pads(export):
        yield "Samples of a pack attend to themselves alone only with its own attention for packs (FlashAttention)"
