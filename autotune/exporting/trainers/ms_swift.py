"""ms-swift: `swift sft sft.yaml`.

Source: swift/dataset/packing.py, swift/dataloader/shard.py, swift/cli/main.py and swift/arguments of version 4.6.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from autotune.draft.shell_script import NoValue
from autotune.draft.trainers import ms_swift as reader
from autotune.errors import ExportError
from autotune.exporting.conversations import Media, checked_sample, messages
from autotune.exporting.counting.counted import Counted, Package, count_by_package
from autotune.exporting.image_limits import image_limits
from autotune.exporting.settings import learning_left_out
from autotune.exporting.trainers import (
    Export,
    kept_of,
    own_settings,
    starter,
    target_regex,
    unread_prompt,
    zero_configuration,
)
from autotune.exporting.turns import CHATML, OwnTurns
from autotune.exporting.video_arguments import VideoArguments, resampled
from autotune.search.space.abilities import Abilities, Packs
from trials.arrays import Ints
from trials.data.index import DatasetIndex
from trials.data.records.sample import Sample
from trials.job import Job
from trials.plan import Padded
from trials.units import number_of

TITLE = reader.TITLE
STARTS_IN = None
READER = reader
NAMES = reader.NAMES

_DATA, _HELD_OUT, _ZERO, _CONFIGURATION = "train.jsonl", "val.jsonl", "zero.json", "sft.yaml"
ARGUMENTS = (
    *("model", "tuner_type", "torch_dtype", "bf16", "learning_rate", "vit_lr", "aligner_lr", "weight_decay"),
    *("adam_beta1", "adam_beta2", "max_grad_norm", "lr_scheduler_type", "warmup_ratio", "warmup_steps"),
    *("num_train_epochs", "max_steps", "seed", "dataloader_num_workers", "output_dir"),
    *("save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps"),
    *("freeze_vit", "freeze_aligner", "freeze_llm", "lora_rank", "lora_alpha", "lora_dropout", "target_modules"),
)
"""Arguments that a job decides."""
DROPPED = (
    *("padding_free", "lazy_tokenize", "streaming", "val_dataset", "eval_dataset", "fsdp", "group_by_length"),
    *("cached_dataset", "cached_val_dataset", "max_epochs", "sequence_parallel_size", "target_regex", "deepspeed"),
    *("trainable_parameters", "trainable_parameters_regex", "freeze_parameters", "freeze_parameters_regex"),
    *("freeze_parameters_ratio", "resume_from_checkpoint", "adapters", "resume_only_model", "columns"),
    *("interleave_prob", "stopping_strategy", "shuffle_buffer_size", "custom_dataset_info", "fp16"),
)
VARIABLES = reader.VARIABLES | {"MODEL_SEQ_LEN", "FORCE_QWENVL_VIDEO_READER"}
_QWEN_VIDEOS = VideoArguments(
    names={
        "fps": "FPS",
        "min_frames": "FPS_MIN_FRAMES",
        "max_frames": "FPS_MAX_FRAMES",
        "min_pixels": "VIDEO_MIN_PIXELS",
        "max_pixels": "VIDEO_MAX_PIXELS",
    }
)
"""Variables of qwen-vl-utils, with which it reads videos of Qwen's models alone (swift/model/models/qwen.py)."""
_OTHER_VIDEOS = VideoArguments(names={}, bounds_all=True)
"""The model's own processor prepares them, or a fixed number of frames is shown."""
_FLASH = "flash_attn"
REMEDY = (
    "give the model's own template and limits of images by template, system, and ENV with MIN_PIXELS and MAX_PIXELS "
    "in a configuration of --from"
)
_PACKAGE = Package(name="ms-swift", title=TITLE, script="ms_swift")


def check(job: Job, family: str) -> None:
    """Refuse nothing."""


def abilities(job: Job) -> Abilities:
    """Return the limits of its plans: no packs in float32, which their attention does not take."""
    no_packs = "packs in float32, which FlashAttention does not take: model.dtype: bfloat16 would allow them"
    packs: Packs = "none" if job.model.dtype == "float32" else "in order"
    return Abilities(packs=packs, no_packs=no_packs, towers="apart")


def write(export: Export, folder: Path) -> None:
    """Write the data as JSON lines in the order of their packs, the configuration, and that of DeepSpeed."""
    media = Media(folder=folder)
    _write_data(folder / _DATA, export.epoch.index, _rows(export), media)
    if export.held_out is not None:
        _write_data(folder / _HELD_OUT, export.held_out, np.arange(len(export.held_out)), media)
    if export.held.plan.layout.zero:
        zero = json.dumps(zero_configuration(export.held.plan.layout.zero), indent=2)
        (folder / _ZERO).write_text(f"{zero}\n", encoding="utf-8")
    text = yaml.safe_dump(_configuration(export), sort_keys=False, allow_unicode=True)
    (folder / _CONFIGURATION).write_text(text, encoding="utf-8")


def _write_data(file: Path, index: DatasetIndex, rows: Ints, media: Media) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for row in rows.tolist():
            record = _record(checked_sample(index, row), media)
            stream.write(f"{json.dumps(record, ensure_ascii=False)}\n")


def _record(sample: Sample, media: Media) -> dict[str, Any]:
    record: dict[str, Any] = {"messages": list(messages(sample))}
    if sample.images:
        record["images"] = [media.of(image) for image in sample.images]
    if sample.videos:
        record["videos"] = [media.of_video(video) for video in sample.videos]
    return record


def count(export: Export, rows: Sequence[int], folder: Path) -> Counted:
    """Count tokens with its own template, or else with the model's own processor."""
    samples = [checked_sample(export.epoch.index, row) for row in rows]
    media = Media(folder=folder, prefix=folder)
    request = {"settings": _configuration(export), "records": [_record(sample, media) for sample in samples]}
    return count_by_package(_PACKAGE, samples, export.job.model, request, export.python)


def _rows(export: Export) -> Ints:
    """Return the rows of the index in the order of the file."""
    epoch = export.epoch
    if (order := export.held.order) is not None:
        return np.concatenate(order.packs)
    # Rank r of W takes items r, r + W and so on: an item of each rank in turns, over the samples of a micro-batch.
    rows = [[epoch.packs.pack(int(pack)) for pack in row] for row in epoch.assignment]
    # A micro-batch with fewer samples would move all later ones.
    rows.sort(key=lambda row: min(map(len, row)) < _most(row))
    items = [pack[number] for row in rows for number in range(_most(row)) for pack in row if number < len(pack)]
    return np.array(items, dtype=np.int64)


def decided(export: Export) -> dict[str, Any]:
    """Return the arguments for the plan, the data and the settings of the job, without the system prompt."""
    vision, language = export.recomputes
    found = own_settings(export.settings, reader.NAMES, ARGUMENTS) | {
        "output_dir": export.output.name,
        "dataset": [_DATA],
        "split_dataset_ratio": 0,
        "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
        "strict": True,
        **_longest(export),
        **_packing(export),
        "gradient_accumulation_steps": export.epoch.micro_batches,
        "gradient_checkpointing": language,
        "vit_gradient_checkpointing": vision,
    }
    if export.job.model.dtype == "float32":
        found["fp16"] = False  # by itself it mixes float16 with weights in float32
    if export.held.plan.layout.zero:
        found["deepspeed"] = _ZERO
    if export.held_out is not None:
        found["val_dataset"] = [_HELD_OUT]
    if environment := _environment(export):
        found["ENV"] = environment
    lora = export.job.training.lora
    if lora.train_projector:
        found["freeze_aligner"] = True  # else adapters would be there
    if lora.rank is not None and lora.targets:
        # Names alone would be looked for in all parts, also in those that are frozen.
        found["target_regex"] = target_regex(lora.parts, lora.targets)
    return found


def _configuration(export: Export) -> dict[str, Any]:
    found = decided(export)
    known = {name: value for name, value in export.present.items() if not isinstance(value, NoValue)}
    kept = kept_of(known, {*found, *DROPPED, *ARGUMENTS}, NAMES)
    system = {} if "template" in kept else _system(export)
    return found | system | kept


def _system(export: Export) -> dict[str, str]:
    """Return the system prompt that the model's own chat template writes by itself; templates there have others.

    Only for ChatML, for which every template there takes a system prompt, be it empty.
    """
    try:
        prompt = OwnTurns(export.job.model).system_of(CHATML)
    except ExportError:
        return {}
    return {} if prompt is None else {"system": prompt}


def _longest(export: Export) -> dict[str, Any]:
    """Return the length at which samples are cut as the job cuts them; else one that none of them reaches.

    A sample above it would be dropped, with its pack.
    """
    return {"max_length": export.cut_length, "truncation_strategy": "delete" if export.cuts_at is None else "right"}


def _packing(export: Export) -> dict[str, Any]:
    if isinstance(export.held.plan.packing, Padded):
        return {"packing": False, "per_device_train_batch_size": export.held.plan.packing.samples}
    assert export.held.order is not None
    return {
        "packing": True,
        "packing_length": export.held.order.length,
        "packing_strategy": "sequential",
        "packing_num_proc": 1,
        "per_device_train_batch_size": 1,
        "attn_impl": export.present.get("attn_impl", _FLASH),
    }


def _environment(export: Export) -> dict[str, str]:
    return _of_folder(export) | _own_environment(export)


def _own_environment(export: Export) -> dict[str, str]:
    own = export.present.get("ENV")
    return {str(name): str(value) for name, value in own.items()} if isinstance(own, dict) else {}


def _of_folder(export: Export) -> dict[str, str]:
    """Return the variables with which images and videos are prepared as in the model folder.

    ms-swift has defaults of its own.
    """
    names = {"min_pixels": "MIN_PIXELS", "max_pixels": "MAX_PIXELS", "max_tiles": "MAX_NUM"}
    limits = {names[name]: str(value) for name, value in image_limits(export.job.model.path).items()}
    return limits | {name: f"{value:.15g}" for name, value in _videos(export).settings(export.videos).items()}


def _videos(export: Export) -> VideoArguments:
    return _QWEN_VIDEOS if export.family.startswith("qwen") else _OTHER_VIDEOS


def _most(row: Sequence[Ints]) -> int:
    return max(map(len, row))


def command(export: Export) -> str:
    """Return the command for a node; of several, each has NODE_RANK and MASTER_ADDR in its environment."""
    return f"{starter(export)} swift sft {_CONFIGURATION}"


def left_out(export: Export) -> Iterator[str]:
    """Yield the order of later epochs, and what padded micro-batches lose."""
    yield from learning_left_out(export.job)
    yield from _videos(export).left_out(export.videos, export.filmed)
    if export.job.training.epochs > 1:
        yield f"another order and other packs in each of the {export.job.training.epochs} epochs: all have the first's"
    order = export.held.order
    if order is not None and order.moved:
        yield (
            f"the place of {number_of(order.moved, 'pack')} of {len(order.packs)} in the rows of their steps: they are "
            "exchanged so that ms-swift ends the pack before; no sample is in another pack or step"
        )
    if order is None and (rest := len(export.epoch.packs.samples) % export.devices):
        yield f"{number_of(rest, 'sample')} at the end of each epoch, of which not every rank would have one"


def notes(export: Export) -> Iterator[str]:
    """Yield the version, a prompt that is kept unread, and what packing needs."""
    yield "Fields and packing are those of ms-swift 4.6; earlier versions have no packing_strategy and pack otherwise"
    prompts = {name: export.present.get(name) for name in ("template", "system")}
    given = {name: value for name, value in prompts.items() if not (value is None or isinstance(value, NoValue))}
    if given and given != _system(export):
        yield unread_prompt(given)
    folder, own = _of_folder(export), _own_environment(export)
    if other := [f"{name}: {own[name]} for {value}" for name, value in folder.items() if own.get(name, value) != value]:
        yield (
            f"WARNING: the configuration has other values than the model folder ({', '.join(other)}); the plan is for "
            "the lengths of the folder, and samples may be longer or shorter there"
        )
    yield from resampled(export.videos, export.family)
    if export.held.order is not None:
        yield "Packing needs FlashAttention there (attn_impl)"
