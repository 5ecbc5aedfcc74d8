"""Settings of a job from the arguments of another trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from autotune.draft.arguments import Arguments
from autotune.draft.trainers import TRAINERS
from autotune.errors import JobError
from trials import plugins, strict_yaml
from trials.job import PARTS, LossWeighting

_Value = TypeVar("_Value")

_PLAIN = {
    "learning_rate": ("training.learning_rate", "number"),
    "vision_lr": ("training.learning_rates.vision", "number"),
    "projector_lr": ("training.learning_rates.projector", "number"),
    "weight_decay": ("training.weight_decay", "number"),
    "save_total_limit": ("training.keep_checkpoints", "count"),
    "seed": ("training.seed", "count"),
    "dataloader_num_workers": ("data.workers", "count"),
    "eval_steps": ("evaluation.every", "count"),
    "output_dir": ("training.output", "text"),
}
"""Key of the job, and kind of value, by common name."""
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
_SEARCHED = {
    "deepspeed",
    "gradient_checkpointing",
    "grad_checkpoint",
    "packing",
    "neat_packing",
    "group_by_length",
    "zero_optimization",
    "fsdp",
    "use_packed_ds",
}
"""Arguments that the search for a plan decides."""
_LORA_RANK = 8
"""Default rank of adapters, as in peft."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """Values and notes of a job file before it is written."""

    values: dict[str, Any] = field(default_factory=dict)
    """Value by dotted key of the job."""
    notes: list[str] = field(default_factory=list)
    """What the user should know or decide."""


def draft_of(arguments: Arguments, devices: int) -> Draft:
    """Return the draft of a job with the settings of the arguments, for a number of devices.

    Raise JobError for arguments of an unknown trainer, and for contradictory ones.
    """
    title, values = _common(arguments)
    draft = Draft(notes=[f"Taken from a configuration of {title}"])
    given = _Given(values)
    for name, (key, kind) in _PLAIN.items():
        if (value := given.take(name, _KINDS[kind])) is not None:
            draft.values[key] = value
    _data(given, draft)
    _precision(given, draft)
    _batch(given, draft, devices)
    _steps(given, draft)
    _loss(given, draft)
    _adapters(given, draft)
    _leave(arguments, given, draft)
    return draft


def _common(arguments: Arguments) -> tuple[str, dict[str, Any]]:
    """Return the trainer's title, and all values by common name."""
    for _, trainer in plugins.each(TRAINERS):
        if trainer.recognises(arguments):
            return trainer.TITLE, trainer.settings(arguments)
    known = ", ".join(trainer.TITLE for _, trainer in plugins.each(TRAINERS))
    raise JobError(f"the arguments are not those of a known trainer: {known}")


def _data(given: "_Given", draft: Draft) -> None:
    if model := given.take("model_name_or_path", _text):
        draft.values["model.path"] = _local(model)
        if not Path(_local(model)).is_dir():
            draft.notes.append(f"{model} is not a folder here; download the model and give its folder as model.path")
    images, folder = given.take("images", _text), given.take("dataset_dir", _text)
    for prefix, files, names in (
        ("data", "data_path", "dataset_names"),
        ("evaluation", "evaluation_path", "evaluation_names"),
    ):
        sources = [_source(path, images) for path in given.take(files, _texts) or ()]
        if listed := given.take(names, _texts):
            entries = {"path": str(Path(folder or "data") / "dataset_info.json"), "names": list(listed)}
            sources.append(entries | ({"images": images} if images else {}))
        if sources:
            draft.values[f"{prefix}.sources"] = sources
    if (share := given.take("evaluation_share", _number)) and "evaluation.sources" not in draft.values:
        draft.values["evaluation.samples"] = share
    if not {"evaluation.sources", "evaluation.samples"} & draft.values.keys():
        draft.values.pop("evaluation.every", None)
    if length := given.take("cut_to", _count):
        draft.values |= {"data.oversize": "truncate", "data.max_tokens": length}


def _source(path: str, images: str | None) -> dict[str, Any]:
    file, is_part, count = path.partition("#")  # ms-swift takes a number of samples after the name
    source: dict[str, Any] = {"path": _local(file)}
    if images:
        source["images"] = images
    if is_part and count.isdigit():
        source["sampling"] = f"random:{count}"
    return source


def _local(path: str) -> str:
    """Return the absolute path if it exists, since the job file may be in another folder; else the text unchanged."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def _precision(given: "_Given", draft: Draft) -> None:
    bf16, fp16 = given.take("bf16", _flag), given.take("fp16", _flag)
    if bf16 and fp16:
        raise JobError("bf16 and fp16 are both on; keep one")
    dtype = given.take("dtype", _text)
    if fp16 or dtype in ("float16", "half"):
        draft.notes.append("float16 is not supported; model.dtype is bfloat16 instead")
    is_half = bf16 or fp16 or dtype in ("bfloat16", "float16", "half")
    # `auto` decides by the checkpoint, so it leaves the job's default.
    if is_half or not given.automatic & {"bf16", "fp16", "dtype"}:
        draft.values["model.dtype"] = "bfloat16" if is_half else "float32"


def _batch(given: "_Given", draft: Draft, devices: int) -> None:
    whole, each, times = (
        given.take(name, _count)
        for name in ("train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    )
    draft.values["hardware.devices"] = devices
    if whole is None and each is None:
        return
    product = (each or 1) * (times or 1) * devices
    if whole is not None and each and times and whole != product:
        raise JobError(
            f"train_batch_size: {whole} is not {each} per device x {times} accumulation steps x {devices} devices = "
            f"{product}; correct one, or give --devices"
        )
    if whole is None and times is None:  # ms-swift accumulates until a step has 16 samples
        product = max(product, 16)
    draft.values["training.global_batch_samples"] = whole or product
    if whole is None:
        draft.notes.append(
            f"A step has {product} samples on {devices} devices; --devices gives another number of devices"
        )


def _steps(given: "_Given", draft: Draft) -> None:
    epochs, steps = given.take("num_train_epochs", _number), given.take("max_steps", _number)
    if steps is not None and steps > 0:
        draft.values["training.max_steps"] = int(steps)
        draft.notes.append("training.epochs has to be enough for training.max_steps")
    if epochs is not None:
        draft.values["training.epochs"] = max(1, -int(-epochs // 1))
        if epochs != int(epochs):
            draft.notes.append(f"{epochs:g} epochs are rounded up; training.max_steps ends a training earlier")
    name = given.take("lr_scheduler_type", _text)
    if name is not None and name not in _SCHEDULES:
        draft.notes.append(f"the schedule {name} is not supported; training.schedule is cosine instead")
    if name is not None:
        draft.values["training.schedule"] = _SCHEDULES.get(name, "cosine")
    warmup = given.take("warmup_steps", _number) or given.take("warmup_ratio", _number)
    if warmup and name != "constant":
        draft.values["training.warmup"] = warmup
    betas = [given.take(name, _number) for name in ("adam_beta1", "adam_beta2")]
    if None not in betas:
        draft.values["training.betas"] = betas
    if norm := given.take("max_grad_norm", _number):
        draft.values["training.clip_norm"] = norm
    if (every := given.take("save_steps", _number)) and every >= 1:
        draft.values["training.checkpoint_every"] = int(every)


def _loss(given: "_Given", draft: Draft) -> None:
    weighting, packs = given.take("loss_reduction", _text), given.take("use_packed_ds", _flag)
    # Taken, so that it is not listed as left out: the note below speaks of it.
    given.take("loss_reduction_all_gather", _flag)
    if packs is not None:
        given.left.add("use_packed_ds")  # for the search to decide
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


def _adapters(given: "_Given", draft: Draft) -> None:
    kind, rank = given.take("finetuning_type", _text), given.take("lora_rank", _count)
    enabled = given.take("lora_enable", _flag)
    if kind not in (None, "full", "lora", "freeze"):
        raise JobError(f"finetuning_type: {kind} is not supported; give full or lora")
    frozen = [
        part for part in PARTS if given.take(f"freeze_{part}", _flag) or given.take(f"tune_{part}", _flag) is False
    ]
    alpha, dropout, target = (
        given.take("lora_alpha", _number),
        given.take("lora_dropout", _number),
        given.take("lora_target", _texts),
    )
    for part in frozen:
        if draft.values.pop(f"training.learning_rates.{part}", None) is not None:
            draft.notes.append(f"The learning rate of the part {part} is left out: its weights are frozen")
    has_adapters = kind == "lora" or enabled or (kind is None and rank and enabled is None)
    if frozen and not has_adapters:
        draft.values["training.freeze"] = frozen
    if not has_adapters:
        return
    # Without an alpha, LLaMA-Factory takes twice the rank.
    rank = rank or _LORA_RANK
    draft.values |= {"training.lora.rank": rank, "training.lora.alpha": int(alpha or 2 * rank)}
    # InternVL's scripts freeze the language model's own weights where it has adapters.
    draft.values["training.lora.parts"] = [part for part in PARTS if part not in frozen] or ["language"]
    if target and not {"all", "all-linear", "auto"} & set(target):
        draft.values["training.lora.targets"] = target
    if dropout:
        draft.notes.append(f"A dropout of {dropout:g} in the adapters is not supported and left out")


def _leave(arguments: Arguments, given: "_Given", draft: Draft) -> None:
    """Add notes about arguments that were not taken over."""
    if arguments.unknown:
        draft.notes.append(f"Not known, since the script does not set them: {', '.join(arguments.unknown)}")
    if given.automatic:
        names = ", ".join(sorted(given.automatic))
        draft.notes.append(f"`auto`, so decided by a script that was not read; check them in the job: {names}")
    if searched := sorted(_SEARCHED & given.left):
        draft.notes.append(f"Left to the search for a plan: {', '.join(searched)}")
    if left := sorted(given.left - _SEARCHED):
        draft.notes.append(f"Not taken over: {', '.join(left)}")


class _Given:
    """Values of arguments, checked as they are taken."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.left = set(values)
        """Names of the values that were not taken."""
        self.automatic: set[str] = set()
        """Names of the values that are `auto`."""

    def take(self, name: str, read: "Callable[[Any], _Value]") -> "_Value | None":
        """Return a value; None where it is absent, empty or `auto`. Raise JobError for one of another kind."""
        value = self._values.get(name)
        self.left.discard(name)
        # Arguments of a script are texts; read as YAML, they become numbers and flags.
        if isinstance(value, str) and read is not _text and read is not _texts:
            value = strict_yaml.read(value.encode()).value
        if value == "auto":
            self.automatic.add(name)
        if value in (None, "auto", ""):
            return None
        try:
            return read(value)
        except (TypeError, ValueError) as error:
            raise JobError(f"{name}: {error}") from error


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.60} is not a number; correct it")
    return value


def _count(value: object) -> int:
    number = _number(value)
    if number != int(number) or number < 0:
        raise ValueError(f"{number:g} is not a count; give a whole number")
    return int(number)


def _flag(value: object) -> bool:
    if value in (True, False):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("yes", "on", "no", "off"):
        return value.lower() in ("yes", "on")
    raise ValueError(f"{value!r:.60} is neither true nor false; correct it")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is not a text; correct it")
    return value


def _texts(value: object) -> list[str]:
    texts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{value!r:.60} is not a list of texts; correct it")
    return [text for text in texts if text]


_KINDS: dict[str, Callable[[Any], Any]] = {"number": _number, "count": _count, "flag": _flag, "text": _text}
