"""Settings of a job from the arguments of another trainer."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, get_args

from autotune.draft.adapters import take_adapters
from autotune.draft.arguments import Arguments
from autotune.draft.draft import Draft
from autotune.draft.given import Given, count, flag, limit, number, text, texts
from autotune.draft.leftovers import notes_on
from autotune.draft.misspelt import take_misspelt
from autotune.draft.present import DEGREES, PACKED, own_packs, present_of, replaced_by_deepspeed
from autotune.draft.trainers import TRAINERS, Trainer
from autotune.errors import JobError
from trials import plugins
from trials.errors import ModelError
from trials.job import LossWeighting, TrainingSection
from trials.model.hub import folder_of, may_be_id
from trials.model.weight_files import chosen_files
from trials.units import number_of

_KEPT = "training.keep_checkpoints"
PLAIN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "learning_rate": ("training.learning_rate", number),
    "vision_lr": ("training.learning_rates.vision", number),
    "projector_lr": ("training.learning_rates.projector", number),
    "weight_decay": ("training.weight_decay", number),
    "save_total_limit": (_KEPT, limit),
    "seed": ("training.seed", count),
    "dataloader_num_workers": ("data.workers", count),
    "output_dir": ("training.output", text),
}
"""Key of the job, and kind of value, by common name."""
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
EVERY = {"save_steps": "training.checkpoint_every", "eval_steps": "evaluation.every"}
"""Key of the job by an argument that is a number of steps, or below 1 a share of all."""
_BATCH = {"per_device_train_batch_size", "gradient_accumulation_steps", *DEGREES}
"""Arguments that decide on the samples of a step."""
_VARIABLES = re.compile(r"ACCELERATE_\w+|USE_(MODELSCOPE|OPENMIND)_HUB|MODEL_SEQ_LEN|FORCE_QWENVL_VIDEO_READER")
"""Variables that libraries of several trainers read: accelerate, LLaMA-Factory and qwen-vl-utils."""
_OTHER_LEARNING = re.compile(r"(?<![a-z])(dpo|kto|ppo|grpo|orpo|mpo|rloo|rlhf|gkd|simpo|reward)(?![a-z])")
_OTHER_TASKS = {"infer", "export", "deploy", "eval", "merge-lora", "app", "web-ui", "chat", "webchat", "api", "sample"}
"""Subcommands of ms-swift and LLaMA-Factory that do not train."""


def draft_of(arguments: Arguments, devices: int) -> Draft:
    """Return the draft of a job with the settings of the arguments, for a number of devices.

    Raise JobError for arguments of an unknown trainer, and for contradictory ones.
    """
    trainer = _trainer_of(arguments)
    draft = Draft(notes=[f"Taken from a configuration of {trainer.TITLE}", *_other_trainings(arguments)])
    draft.notes += arguments.remarks
    variables = {name: value for name, value in arguments.environment.items() if _VARIABLES.fullmatch(name)}
    given = Given(trainer.settings(arguments) | variables)
    draft.notes += given.take("remarks", texts) or []
    for name, (key, read) in PLAIN.items():
        if (value := given.take(name, read)) is not None:
            draft.values[key] = value
    _checkpoints(given, draft)
    _data(given, draft)
    _precision(given, draft)
    named = given.take("processes", count)
    processes = arguments.devices or named
    _batch(given, draft, devices, processes or devices)
    if processes is None:
        draft.notes.append(f"The number of devices is not read from the configuration; it is {devices} here")
    _steps(given, draft)
    _loss(given, draft)
    take_adapters(given, draft)
    draft.notes += replaced_by_deepspeed(given)
    draft.present = present_of(given, arguments)
    draft.notes += take_misspelt(given, arguments.values, trainer)
    # Variables have the names of arguments in capitals, such as MAX_PIXELS.
    own = arguments.values.get("ENV")
    names = (*arguments.environment, *(own if isinstance(own, dict) else ()))
    draft.notes += notes_on(given, {*arguments.values, *(str(name).lower() for name in names)})
    return draft


def absent_files(values: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield notes on the model, its weights and the data that are not here; `folder` is that of the job."""
    model = values["model.path"]
    held = folder / folder_of(model)
    if held.is_dir():
        try:
            chosen_files(held)
        except ModelError as error:
            yield str(error)
    else:
        places = ("neither a folder nor in the hub's cache", f"run `hf download {model}`, or ")
        where, download = places if may_be_id(model) else ("no folder", "")
        yield f"{model} is {where} here; {download}give the folder of the model as model.path"
    for key in ("data.sources", "evaluation.sources"):
        if missing := [source["path"] for source in values.get(key, ()) if not (folder / source["path"]).exists()]:
            yield f"Not files here, so give their paths in {key}: {', '.join(missing)}"


def _trainer_of(arguments: Arguments) -> Trainer:
    for word in sorted(arguments.words):
        if other := _OTHER_LEARNING.search(PurePath(word).stem):
            raise JobError(f"{word}: only supervised fine-tuning can be trained here, not {other[0].upper()}")
    for _, trainer in plugins.each(TRAINERS):
        if trainer.recognises(arguments):
            return trainer
    known = ", ".join(trainer.TITLE for _, trainer in plugins.each(TRAINERS))
    raise JobError(f"the arguments are not those of a known trainer: {known}")


def _other_trainings(arguments: Arguments) -> Iterator[str]:
    """Yield that a script starts further trainings, of which the job is none."""
    others = [
        each
        for each in arguments.others
        if not each.words & _OTHER_TASKS and any(it.recognises(each) for _, it in plugins.each(TRAINERS))
    ]
    if others:
        yield (
            f"The script starts {len(others) + 1} trainings, and the job is the one with the most options, of "
            f"{arguments.place}; not those of {'; '.join(each.place for each in others)}"
        )


def _data(given: Given, draft: Draft) -> None:
    if model := given.take("model_name_or_path", text):
        draft.values["model.path"] = _local(model)
    shared, folder = given.take("images", text), given.take("dataset_dir", text)
    for prefix, files, names, own in (
        ("data", "data_path", "dataset_names", None),
        ("evaluation", "evaluation_path", "evaluation_names", given.take("evaluation_images", text)),
    ):
        named = own or shared
        images = named and _local(named)
        sources = [_source(path, images) for path in given.take(files, texts) or ()]
        sources += given.take(f"{prefix}_sources", _sources) or []
        if listed := given.take(names, texts):
            entries = {"path": _local(str(Path(folder or "data") / "dataset_info.json")), "names": list(listed)}
            entries |= {"sampling": f"first:{most}"} if (most := given.take("max_samples", count)) else {}
            sources.append(entries | ({"images": images} if images else {}))
        if sources:
            draft.values[f"{prefix}.sources"] = sources
    if (share := given.take("evaluation_share", number)) and "evaluation.sources" not in draft.values:
        draft.values["evaluation.samples"] = share
    if not {"evaluation.sources", "evaluation.samples"} & draft.values.keys():
        draft.values.pop("evaluation.every", None)
    if length := given.take("cut_to", count):
        draft.values |= {"data.oversize": "truncate", "data.max_tokens": length}


def _source(path: str, images: str | None) -> dict[str, Any]:
    # ms-swift takes a number of samples after the name, which a smaller file shows several times; Qwen-VL a percentage.
    part = re.fullmatch(r"(.+?)(?:#(\d+)|%(\d+))", path)
    file, number, percent = part.groups() if part else (path, None, None)
    source: dict[str, Any] = {"path": _local(file)}
    if images:
        source["images"] = images
    if part:
        source["sampling"] = f"exactly:{number}" if number else f"random:{percent}%"
    return source


def _sources(value: object) -> list[dict[str, Any]]:
    """Return sources of the job, which a trainer makes of data sets that are more than a path."""
    assert isinstance(value, list)
    return [{**source, "path": _local(source["path"])} for source in value]


def _local(path: str) -> str:
    """Return the absolute path if it exists, since the job file may be in another folder; else the text unchanged."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def _precision(given: Given, draft: Draft) -> None:
    bf16, fp16 = given.take("bf16", flag) or given.take("pure_bf16", flag), given.take("fp16", flag)
    if bf16 and fp16:
        raise JobError("bf16 and fp16 are both on; keep one")
    dtype = given.take("dtype", text)
    if fp16 or dtype in ("float16", "half"):
        draft.notes.append("float16 is not supported; model.dtype is bfloat16 instead")
    is_half = bf16 or fp16 or dtype in ("bfloat16", "float16", "half")
    # `auto` decides by the checkpoint, so it leaves the job's default, as does what is not known.
    if is_half or not (given.automatic | given.unknown) & {"bf16", "fp16", "dtype"}:
        draft.values["model.dtype"] = "bfloat16" if is_half else "float32"


def _batch(given: Given, draft: Draft, devices: int, processes: int) -> None:
    """Take the samples of a step, which the processes of the other trainer compute, on these devices."""
    whole, each, times = (
        given.take(name, count)
        for name in ("train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    )
    least = given.take("least_batch_samples", count)
    degrees = {name: degree for name in DEGREES if (degree := given.look(name, count) or 1) > 1}
    draft.values["hardware.devices"] = devices
    unknown = sorted(given.unknown & {"train_batch_size", *_BATCH} | given.automatic & _BATCH)
    if whole is None and unknown:
        draft.notes.append(f"training.global_batch_samples is not that of the script, which does not set {unknown[0]}")
        return
    if whole is None and each is None:
        return
    if whole is None and times is None and least:
        times = -(-least // ((each or 1) * processes))
    product = (each or 1) * (times or 1) * processes
    if whole is not None and each and times and whole != product:
        raise JobError(
            f"train_batch_size: {whole} is not {each} per device x {number_of(times, 'accumulation step')} x "
            f"{number_of(processes, 'device')} = {product}; correct one, or give --devices"
        )
    # Processes that share samples compute them once.
    shared = math.prod(degrees.values())
    if whole is None and processes % shared:
        raise JobError(
            f"{', '.join(f'{name}: {degree}' for name, degree in degrees.items())}: {number_of(processes, 'device')} "
            f"cannot be split into groups of {shared}; correct it, or give --devices"
        )
    draft.values["training.global_batch_samples"] = whole or product // shared
    packed = next((name for name in PACKED if given.look(name, flag)), None)
    if whole is None:
        splits = "".join(f" / {degree} ({name})" for name, degree in degrees.items())
        draft.notes.append(
            f"A step has {number_of(product // shared, 'pack' if packed else 'sample')}: {each} per device x "
            f"{number_of(times or 1, 'accumulation step')} x {number_of(processes, 'device')}{splits}"
        )
    if packed:
        draft.packs = own_packs(given)
        if draft.packs is None:
            draft.notes.append(
                f"With {packed}, each of a step's samples is a pack there, of an unknown length; multiply "
                "training.global_batch_samples by the mean number of samples in a pack before tuning"
            )


def _checkpoints(given: Given, draft: Draft) -> None:
    """Take the steps between checkpoints and evaluations. A share of all steps is not taken."""
    strategies = {"save_steps": given.take("save_strategy", text), "eval_steps": given.look("eval_strategy", text)}
    for name, key in EVERY.items():
        every = given.take(name, number)
        if not every or strategies[name] not in (None, "steps"):
            continue
        if every >= 1:
            draft.values[key] = int(every)
        else:
            draft.notes.append(f"{name}: {every:g} is a share of all steps; give {key} a number of steps")
    if strategies["save_steps"] == "no":
        draft.notes.append("The configuration writes no checkpoints, and the job one at the end of each epoch")
    elif _KEPT not in draft.values:
        kept = TrainingSection.model_fields["keep_checkpoints"].default
        draft.notes.append(f"The configuration keeps all checkpoints, and the job the newest {kept}: see {_KEPT}")


def _steps(given: Given, draft: Draft) -> None:
    epochs, steps = given.take("num_train_epochs", number), given.take("max_steps", number)
    if steps is not None and steps > 0:
        draft.values["training.max_steps"] = int(steps)
        draft.notes.append("training.epochs has to be enough for training.max_steps")
    if epochs is not None:
        draft.values["training.epochs"] = max(1, -int(-epochs // 1))
        if epochs != int(epochs):
            draft.notes.append(f"{epochs:g} epochs are rounded up; training.max_steps ends a training earlier")
    name = given.take("lr_scheduler_type", text)
    if name is not None and name not in SCHEDULES:
        draft.notes.append(f"the schedule {name} is not supported; training.schedule is cosine instead")
    if name is not None:
        draft.values["training.schedule"] = SCHEDULES.get(name, "cosine")
    warmup = given.take("warmup_steps", number) or given.take("warmup_ratio", number)
    if warmup and name != "constant":
        draft.values["training.warmup"] = warmup
    betas = [given.take(name, number) for name in ("adam_beta1", "adam_beta2")]
    if None not in betas:
        draft.values["training.betas"] = betas
    if norm := given.take("max_grad_norm", number):
        draft.values["training.clip_norm"] = norm


def _loss(given: Given, draft: Draft) -> None:
    if given.take("averages_micro_batches", flag):
        draft.notes.append(
            "The loss is the mean over all target tokens of a step; there it is the mean of those of its "
            "micro-batches, so that a token of a micro-batch with few of them counts more"
        )
    weighting = given.take("loss_reduction", text)
    packs = given.look("use_packed_ds", flag)  # is for the search to decide
    # Taken, so that it is not listed as left out: the note below speaks of it.
    given.take("loss_reduction_all_gather", flag)
    if weighting is None:
        return
    if weighting not in get_args(LossWeighting):
        raise JobError(f"loss_reduction: {weighting} is not supported; give {', '.join(get_args(LossWeighting))}")
    if not packs:
        draft.notes.append("loss_reduction is left out: it means nothing there without use_packed_ds")
        return
    draft.values["training.loss_weighting"] = weighting
    draft.notes.append(
        "The loss is normalised over all samples of a step; loss_reduction is over those of a micro-batch, or of one "
        "on each device with loss_reduction_all_gather"
    )
