"""InternVL's own fine-tuning: a launch script. Source: internvl_chat/internvl/train and shell of its repository."""

import json
import shlex
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from autotune.draft.trainers import transformers_trainer as reader
from autotune.errors import ExportError
from autotune.exporting.conversations import Media, checked_sample, human_and_gpt
from autotune.exporting.counting.counted import Counted, count_by_processor
from autotune.exporting.image_limits import image_limits
from autotune.exporting.pack_stream import BUFFER, PackStream, stream_of
from autotune.exporting.settings import common_settings, mean_left_out, weighting_left_out
from autotune.exporting.trainers import (
    ROOM,
    Export,
    kept_of,
    launch_script,
    own_settings,
    unread_prompt,
    zero_configuration,
)
from autotune.exporting.turns import CHATML, OwnTurns
from autotune.search.space.abilities import Abilities
from trials.job import Job
from trials.plan import Packed

TITLE = "InternVL"
STARTS_IN = "internvl_chat of its repository"
READER = reader
NAMES = reader.NAMES

_DATA, _META, _ZERO, _SCRIPT = "train.jsonl", "meta.json", "zero.json", "sft.sh"
ARGUMENTS = (
    *("model_name_or_path", "bf16", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm"),
    *("lr_scheduler_type", "warmup_ratio", "warmup_steps", "num_train_epochs", "max_steps", "seed"),
    *("dataloader_num_workers", "output_dir", "save_strategy", "save_steps", "save_total_limit"),
    *("freeze_backbone", "freeze_mlp", "freeze_llm", "use_llm_lora"),
)
"""Arguments that a job decides."""
DROPPED = (
    *("deepspeed", "use_packed_ds", "use_backbone_lora", "group_by_length", "max_buffer_size"),
    *("use_data_resampling", "replacement", "allow_overflow", "unfreeze_vit_layers", "unfreeze_lm_head"),
    *("resume_from_checkpoint", "train_batch_size", "fp16"),
)
REMEDY = "save the model's own chat template and limits of tiles in its folder"
VARIABLES: frozenset[str] = frozenset()
_STYLE, _TILE = "internvl2_5", 448


def check(job: Job, family: str) -> None:
    """Raise ExportError for a model of another family, rates of parts, and adapters beyond the language model."""
    if not family.startswith("internvl"):
        raise ExportError(
            f"{TITLE}'s scripts train its own models alone, and this is one of type {family}; export to ms-swift"
        )
    if {"vision_lr", "projector_lr"} & common_settings(job).keys():
        raise ExportError(
            f"training.learning_rates: {TITLE}'s scripts have one rate for all parts; remove the others, or export to "
            "ms-swift"
        )
    if job.training.lora.rank is not None and job.training.lora.parts != ("language",):
        raise ExportError(
            f"training.lora.parts: {', '.join(job.training.lora.parts)}; {TITLE}'s scripts are exported with adapters "
            "in the language model alone; export to ms-swift"
        )


def abilities(job: Job) -> Abilities:  # noqa: ARG001 - the same for every job
    """Return the limits of its plans."""
    return Abilities(packs="by length", towers="vision always")


def write(export: Export, folder: Path) -> None:
    """Write the samples, their description, the launch script, and DeepSpeed's configuration."""
    media = Media(folder=folder, prefix=export.folder)
    rows = sorted(export.epoch.packs.samples.tolist())
    with (folder / _DATA).open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(f"{json.dumps(_record(export, row, media), ensure_ascii=False)}\n")
    described = {
        "root": "",
        "annotation": str(export.folder / _DATA),
        "data_augment": False,
        "max_dynamic_patch": _tiles(export),
        "repeat_time": 1,
        "length": len(rows),
    }
    (folder / _META).write_text(json.dumps({export.folder.name: described}, indent=2), encoding="utf-8")
    if export.held.plan.layout.zero:
        zero = json.dumps(zero_configuration(export.held.plan.layout.zero), indent=2)
        (folder / _ZERO).write_text(f"{zero}\n", encoding="utf-8")
    program = "internvl/train/internvl_chat_finetune.py"
    script = launch_script(export, program, _arguments(export), LAUNCHER="pytorch")
    (folder / _SCRIPT).write_text(script, encoding="utf-8")


def _style(export: Export) -> str:
    return str(export.present.get("conv_style", _STYLE))


def _record(export: Export, row: int, media: Media) -> dict[str, Any]:
    """Return a sample, whose length its sampler would otherwise guess.

    Where no turn says that there is no system prompt, dataset.py writes that of the style.
    """
    record = human_and_gpt(export.epoch.index, row, media, "image", "video", holds_prompt=_style(export) == _STYLE)
    return {"id": row, **record, "length": int(export.epoch.index.text_tokens[row])}


def count(export: Export, rows: Sequence[int], folder: Path) -> Counted:  # noqa: ARG001 - writes none
    """Count tokens with the model's own processor. Raise ExportError where its turns are not those of the style."""
    if export.videos:
        raise ExportError(
            f"data: samples with videos, which {TITLE}'s scripts read through a client of their own storage alone; "
            "leave these samples out, or export to ms-swift"
        )
    if "conv_style" not in export.present and OwnTurns(export.job.model).system_of(CHATML) != "":
        raise ExportError(
            f"model.path: its chat template writes other turns than the style {_STYLE}, or a system prompt of its own, "
            "which would be another prompt; name its own style by conv_style in a configuration of --from, or export "
            "to ms-swift"
        )
    samples = [checked_sample(export.epoch.index, row) for row in rows]
    return count_by_processor(samples, export.job.model, why_not="it is no package")


def _has_its_turns(export: Export) -> bool:
    """Return whether the model's own chat template writes the turns of the usual style, without a system prompt."""
    try:
        return OwnTurns(export.job.model).system_of(CHATML) == ""
    except ExportError:
        return False


def _tiles(export: Export) -> int:
    return image_limits(export.job.model.path).get("max_tiles", 12)


def decided(export: Export) -> dict[str, Any]:
    """Return the arguments for the plan, the data and the settings of the job."""
    packing, training = export.held.plan.packing, export.job.training
    found = own_settings(export.settings, reader.NAMES, ARGUMENTS) | {
        "output_dir": str(export.output),
        "do_train": True,
        "conv_style": _style(export),
        "meta_path": str(export.folder / _META),
        "use_packed_ds": isinstance(packing, Packed),
        "gradient_accumulation_steps": export.epoch.micro_batches,
        "max_seq_length": _longest(export),
        "grad_checkpoint": export.recomputes[1],
        "force_image_size": export.present.get("force_image_size", _TILE),
        "max_dynamic_patch": _tiles(export),
        "dynamic_image_size": True,
        "use_thumbnail": True,
    }
    if isinstance(packing, Packed):
        stream = _stream(export)
        found |= {"num_images_expected": stream.images, "max_packed_tokens": stream.tokens, "strict_mode": False}
        found |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": stream.micro_batches}
        found["max_buffer_size"] = BUFFER
        found |= {"loss_reduction": training.loss_weighting, "loss_reduction_all_gather": True}
        # Its packs are a stream without a length, for which Trainer asks for a number of steps.
        steps = training.epochs * stream.steps
        found["max_steps"] = min(steps, training.max_steps or steps)
        found["remove_unused_columns"] = False
    else:
        found["per_device_train_batch_size"] = getattr(packing, "samples", 1)
        # Else it pads each sample to max_seq_length.
        found["group_by_length"] = True
    if training.lora.rank is not None:  # its scripts freeze the language model's own weights themselves
        found["freeze_llm"] = True
    if export.held.plan.layout.zero:
        found["deepspeed"] = str(export.folder / _ZERO)
    return found


def _arguments(export: Export) -> dict[str, Any]:
    found = decided(export)
    return found | kept_of(export.present, {*found, *ARGUMENTS, *DROPPED}, NAMES)


def _longest(export: Export) -> int:
    """Return the tokens at which it cuts samples: no more than the longest may have, for which its packs need room."""
    longest = int(export.epoch.index.text_tokens[export.epoch.packs.samples].max()) + ROOM
    return longest if export.cuts_at is None else min(longest, export.cuts_at)


@lru_cache(maxsize=1)
def _stream(export: Export) -> PackStream:
    packing = export.held.plan.packing
    assert isinstance(packing, Packed)
    return stream_of(export.epoch, max(packing.qt, _longest(export)))


def command(export: Export) -> str:
    """Return the command, whose script is in the exported folder."""
    return f"bash {shlex.quote(str(export.folder / _SCRIPT))}"


def left_out(export: Export) -> Iterator[str]:
    """Yield what its data and its settings do not hold."""
    packing = export.held.plan.packing
    if isinstance(packing, Packed):
        stream, epoch = _stream(export), export.epoch
        yield (
            f"the packs themselves, their order and their steps: its own packer fills packs up to {stream.images} "
            f"images and {stream.tokens} tokens, about {stream.packs} packs of an epoch where the plan has "
            f"{np.count_nonzero(epoch.packs.counts)}, and {stream.batch_samples:.1f} samples of a step where it has "
            f"{epoch.batch_samples:.1f}"
        )
        if stream.tokens > packing.qt + ROOM:
            yield (
                f"packs of at most {packing.qt} tokens: each may have the {stream.tokens} of the longest sample there, "
                "and needs memory for them"
            )
        yield from mean_left_out(stream.micro_batches)
    else:
        yield "the order of the samples: micro-batches have samples of about the same length there"
        yield from mean_left_out(export.epoch.micro_batches * export.devices)
        yield from weighting_left_out(export.job)
    if export.job.model.dtype == "float32":
        yield "model.dtype: float32; its script loads all weights in bfloat16"
    if export.held_out is not None:
        yield "evaluation: held-out samples are left out of the data, and not evaluated on there"
    lora = export.job.training.lora
    if lora.rank is not None:
        yield (
            "training.lora: adapters have a dropout of 0.05 there, its own choice of layers, and an alpha of twice the "
            "rank"
        )


def notes(export: Export) -> Iterator[str]:
    """Yield a prompt that is kept unread, which packs the predicted time is for, and what the model has to be."""
    if "conv_style" in export.present and not (_style(export) == _STYLE and _has_its_turns(export)):
        yield unread_prompt({"conv_style": _style(export)})
    if isinstance(export.held.plan.packing, Packed):
        yield "The predicted time of an epoch is that of the plan's packs, not of those that its own packer makes"
    yield "model_name_or_path has to be the model in InternVL's own form, not in that of transformers"
