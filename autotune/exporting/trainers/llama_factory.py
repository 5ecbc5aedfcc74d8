"""LLaMA-Factory: `llamafactory-cli train sft.yaml`. Source: its src/llamafactory/hparams and data of 0.9."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from autotune.draft.shell_script import NoValue
from autotune.draft.trainers import llama_factory as reader
from autotune.errors import ExportError
from autotune.exporting.conversations import Media, checked_sample, has_unlearnt, messages, numbered
from autotune.exporting.counting.counted import Counted, Package, count_by_package
from autotune.exporting.image_limits import image_limits
from autotune.exporting.settings import check_mergers, common_settings, learning_left_out
from autotune.exporting.trainers import (
    Export,
    kept_of,
    own_settings,
    starter,
    unread_prompt,
    zero_configuration,
)
from autotune.exporting.turns import CHATML, GEMMA, GLM_THINKING, LLAMA_3, MISTRAL, VICUNA, OwnTurns, Turns
from autotune.exporting.video_arguments import VideoArguments, resampled
from autotune.search.space.abilities import Abilities
from trials.arrays import Ints
from trials.data.index import DatasetIndex
from trials.data.records.sample import Sample
from trials.job import Job, ModelSection
from trials.model.skeleton import build_skeleton, load_config
from trials.plan import Padded
from trials.units import number_of

TITLE = reader.TITLE
STARTS_IN = None
READER = reader
NAMES = reader.NAMES

_DATA, _HELD_OUT, _INFO, _ZERO, _CONFIGURATION = "train.json", "val.json", "dataset_info.json", "zero.json", "sft.yaml"
ARGUMENTS = (
    *("model_name_or_path", "finetuning_type", "bf16", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2"),
    *("max_grad_norm", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "num_train_epochs", "max_steps", "seed"),
    *("dataloader_num_workers", "output_dir", "save_strategy", "save_steps", "save_total_limit"),
    *("eval_strategy", "eval_steps", "lora_rank", "lora_alpha", "lora_dropout", "lora_target"),
    *("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"),
)
"""Arguments that a job decides."""
DROPPED = (
    *("packing", "neat_packing", "deepspeed", "val_size", "eval_dataset", "streaming", "max_samples", "mix_strategy"),
    *("tokenized_path", "interleave_probs", "media_dir", "resume_from_checkpoint", "adapter_name_or_path"),
    *("create_new_adapter", "freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"),
    *("buffer_size", "eval_on_each_dataset", "fsdp", "fsdp_config", "pure_bf16", "fp16"),
)
VARIABLES: frozenset[str] = frozenset()
_UNLIMITED = 1_000_000_000
"""Pixels of an image that is never made smaller."""
_VIDEOS = VideoArguments(names={"fps": "video_fps", "max_frames": "video_maxlen"}, bounds_all=True)
"""Its own bounds are of each frame, before the model's processor applies those of the folder."""
_TEMPLATES = {
    "qwen2_vl": {"qwen2_vl": CHATML},
    "qwen2_5_vl": {"qwen2_vl": CHATML},
    "qwen3_vl": {"qwen3_vl_nothink": CHATML},
    "qwen3_vl_moe": {"qwen3_vl_nothink": CHATML},
    "internvl": {"intern_vl": CHATML},
    "llava": {"llava": VICUNA},
    "llava_next": {
        "llava_next": VICUNA,
        "llava_next_mistral": MISTRAL,
        "llava_next_llama3": LLAMA_3,
        "llava_next_yi": CHATML,  # as llava_next_qwen, which besides changes the tokenizer's end of a text
    },
    "gemma3": {"gemma3": GEMMA},
    "glm4v": {"glm4v": GLM_THINKING},
    "glm4v_moe": {"glm4_5v": GLM_THINKING},
}
"""Turns by the name of the template, by model type, as data/template.py has them."""
REMEDY = (
    "give the model's own template by template and default_system in a configuration of --from, and resize large images"
)
_PACKAGE = Package(name="llamafactory", title=TITLE, script="llama_factory")


def check(job: Job, family: str) -> None:
    """Raise ExportError for rates of parts, which it does not have, and parts that would be trained otherwise there."""
    check_mergers(job, family, TITLE)
    lora = job.training.lora
    if lora.rank is not None and "projector" in lora.parts and not lora.targets:
        raise ExportError(
            f"training.lora.parts: projector; {TITLE} has adapters there only on layers that training.lora.targets "
            "names; name them, or export to ms-swift"
        )
    _check_targets(job)
    common = common_settings(job)
    if rates := [name for name in ("vision_lr", "projector_lr") if name in common]:
        raise ExportError(
            f"training.learning_rates: {TITLE} has one rate for all parts, and the job others ({', '.join(rates)}); "
            f"remove them, or export to ms-swift, which trains {family} with rates of its own"
        )


def _check_targets(job: Job) -> None:
    """Raise ExportError for names of layers that are parts of other names: adapters would be on those layers too."""
    lora = job.training.lora
    if lora.rank is None or not lora.targets:
        return
    # Here, because peft takes a second to import.
    from trials.model.adapters import is_named, linear_layers  # noqa: PLC0415

    config = load_config(job.model.path, trust_remote_code=job.model.trust_remote_code)
    layers = linear_layers(build_skeleton(config, torch.float32), lora.parts)
    others = [name for name in layers if not any(is_named(name, target) for target in lora.targets)]
    for target, name in product(lora.targets, others):
        if target in name:
            raise ExportError(
                f"training.lora.targets: {target} is also a part of {name}, and {TITLE} has adapters on every layer "
                "with a target in its name; name the layers by longer ends, such as attn.proj, or export to ms-swift"
            )


def abilities(job: Job) -> Abilities:  # noqa: ARG001 - the same for every job
    """Return the limits of its plans."""
    return Abilities(packs="none")


def write(export: Export, folder: Path) -> None:
    """Write the data, their description, the configuration, and that of DeepSpeed."""
    media, index = Media(folder=folder, prefix=export.folder), export.epoch.index
    rows = np.concatenate([export.epoch.packs.pack(int(pack)) for pack in numbered(export.epoch)])
    _write_data(folder / _DATA, index, rows, media)
    files = {"train": _DATA}
    if export.held_out is not None:
        _write_data(folder / _HELD_OUT, export.held_out, np.arange(len(export.held_out)), media)
        files["val"] = _HELD_OUT
    (folder / _INFO).write_text(json.dumps({name: _described(file) for name, file in files.items()}, indent=2))
    if export.held.plan.layout.zero:
        (folder / _ZERO).write_text(json.dumps(zero_configuration(export.held.plan.layout.zero), indent=2))
    text = yaml.safe_dump(_configuration(export), sort_keys=False, allow_unicode=True)
    (folder / _CONFIGURATION).write_text(text, encoding="utf-8")


def _write_data(file: Path, index: DatasetIndex, rows: Ints, media: Media) -> None:
    records = [_record(_sample(index, row), media) for row in rows.tolist()]
    file.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")


def _sample(index: DatasetIndex, row: int) -> Sample:
    sample = checked_sample(index, row)
    if has_unlearnt(sample):
        raise ExportError(
            f"{index.where(row)}: an answer is without loss, which {TITLE} does not support; export to ms-swift"
        )
    roles = [turn.role for turn in sample.turns if turn.role != "system"]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise ExportError(
            f"{index.where(row)}: turns of user and assistant that do not alternate, which {TITLE} leaves out, so that "
            "all later micro-batches would have other samples; leave the sample out, or export to ms-swift"
        )
    return sample


def _record(sample: Sample, media: Media) -> dict[str, Any]:
    return {
        "messages": list(messages(sample)),
        "images": [media.of(image) for image in sample.images],
        "videos": [media.of_video(video) for video in sample.videos],
    }


def count(export: Export, rows: Sequence[int], folder: Path) -> Counted:
    """Count tokens with its own template and mm_plugin, or else with the model's own processor."""
    samples = [_sample(export.epoch.index, row) for row in rows]
    media = Media(folder=folder, prefix=folder)
    records = [_record(sample, media) for sample in samples]
    request = {"settings": _configuration(export), "described": {"train": _described(_DATA)}, "records": records}
    return count_by_package(_PACKAGE, samples, export.job.model, request, export.python)


def _described(file: str) -> dict[str, Any]:
    return {
        "file_name": file,
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images", "videos": "videos"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    }


def decided(export: Export) -> dict[str, Any]:
    """Return the arguments for the plan, the data and the settings of the job, without the template."""
    packing = export.held.plan.packing
    assert isinstance(packing, Padded)
    limits = image_limits(export.job.model.path)
    found = own_settings(export.settings, reader.NAMES, ARGUMENTS) | {
        "output_dir": str(export.output),
        "stage": "sft",
        "do_train": True,
        "dataset_dir": str(export.folder),
        "dataset": "train",
        "disable_shuffling": True,
        "packing": False,
        "cutoff_len": export.cut_length,
        "per_device_train_batch_size": packing.samples,
        "gradient_accumulation_steps": export.epoch.micro_batches,
        "disable_gradient_checkpointing": not export.recomputes[1],
    }
    targets = found.get("lora_target")
    if targets is not None:
        found["lora_target"] = "all" if isinstance(targets, str) else ",".join(targets)
    if export.job.training.lora.train_projector:
        found["freeze_multi_modal_projector"] = True  # else adapters could be there
    # Its own limits, which come before those of the model's processor, are small by default.
    for name, default in (("max_pixels", _UNLIMITED), ("min_pixels", 1)):
        found[f"image_{name}"] = limits.get(name, export.present.get(f"image_{name}", default))
        if export.videos:
            own = getattr(export.videos, name) if export.videos.is_of_frame else None
            found[f"video_{name}"] = own or export.present.get(f"video_{name}", default)
    found |= _VIDEOS.settings(export.videos)
    if export.held.plan.layout.zero:
        found["deepspeed"] = str(export.folder / _ZERO)
    if export.held_out is not None:
        found["eval_dataset"] = "val"
    return found


def _configuration(export: Export) -> dict[str, Any]:
    found = decided(export)
    known = {name: value for name, value in export.present.items() if not isinstance(value, NoValue)}
    kept = kept_of(known, {*found, *ARGUMENTS, *DROPPED}, NAMES)
    return {**found, **_prompt(export, kept), **kept}


def _prompt(export: Export, kept: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments for the prompt of the model's own chat template, also with a template that is kept.

    Raise ExportError where that has other turns or another system prompt. One that is not known here is kept unread.
    """
    model, name = export.job.model, kept.get("template")
    if name is None:
        return template_of(model, export.family)
    if (turns := _turns_of(name)) is None:
        return {}
    system = OwnTurns(model).system_of(turns)
    if system is None:
        raise ExportError(
            f"template: {name} of the configuration writes other turns than the model's own chat template, which would "
            "be another prompt; name one with the same turns, or export to ms-swift"
        )
    if (given := kept.get("default_system", system)) != system:
        raise ExportError(
            f"default_system: {given!r} of the configuration is not the system prompt of the model's own chat "
            f"template, {system!r}; leave it out, or change one of the two"
        )
    return {"default_system": system}


def _turns_of(name: str) -> Turns | None:
    """Return the turns of a template, None for one that is not known here."""
    return next((known[name] for known in _TEMPLATES.values() if name in known), None)


def template_of(model: ModelSection, family: str) -> dict[str, str]:
    """Return the arguments for the turns and the system prompt that the model's own chat template writes.

    Raise ExportError where no template for this `model_type` writes these turns.
    """
    remedy = f"give a configuration by --from whose `template` is {TITLE}'s for the turns of the model's chat template"
    if (known := _TEMPLATES.get(family)) is None:
        raise ExportError(f"no template of {TITLE} is known for models of type {family}; {remedy}")
    own = OwnTurns(model)
    for name, turns in known.items():
        if (system := own.system_of(turns)) is not None:
            return {"template": name, "default_system": system}
    raise ExportError(
        f"model.path: its chat template writes other turns than {TITLE}'s for {family} ({', '.join(known)}), which "
        f"would be another prompt; {remedy}, or export to ms-swift"
    )


def command(export: Export) -> str:
    """Return the command for a node; of several, each has NODE_RANK and MASTER_ADDR in its environment."""
    return f"FORCE_TORCHRUN=1 {starter(export)} llamafactory-cli train {_CONFIGURATION}"


def left_out(export: Export) -> Iterator[str]:
    """Yield what its data, its loss and padded micro-batches hold otherwise."""
    yield from learning_left_out(export.job, export.epoch.micro_batches * export.devices)
    training = export.job.training
    if export.job.model.dtype == "float32" and (training.freeze or training.lora.rank is not None):
        yield (
            "model.dtype: float32; frozen weights, also those beneath adapters, are in the checkpoint's bfloat16 "
            "there, or else in float16"
        )
    yield from _VIDEOS.left_out(export.videos, export.filmed)
    if export.cuts_at is not None:
        yield "data.oversize: truncate; questions are cut there along with answers, and not the end of a sample alone"
    if export.job.training.epochs > 1:
        yield f"another order in each of the {export.job.training.epochs} epochs: all have the first's"
    if rest := len(export.epoch.packs.samples) % export.devices:
        yield f"{number_of(rest, 'sample')} at the end of each epoch, where others are shown again"


def notes(export: Export) -> Iterator[str]:
    """Yield the template that was chosen, and one that is kept unread."""
    given = export.present.get("template")
    if given is None or isinstance(given, NoValue):
        template = template_of(export.job.model, export.family)["template"]
        yield f"The template is {template}, which writes the turns of the model's own chat template"
    elif _turns_of(given) is None:
        yield unread_prompt({"template": given})
    yield from resampled(export.videos, export.family)
