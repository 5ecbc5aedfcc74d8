"""Settings of a job by the common names of `autotune.draft`, as trainers know them: `init --from` backwards."""

from collections.abc import Iterator
from typing import Any

from autotune.draft.settings import EVERY, PLAIN
from autotune.errors import ExportError
from trials.job import PARTS, Job
from trials.workload import Part

_EVERYTHING = "all-linear"
_RATES: dict[Part, str] = {"vision": "vision_lr", "projector": "projector_lr"}


def common_settings(job: Job) -> dict[str, Any]:
    """Return the value of each setting that `autotune init --from` reads, but those of data and plan."""
    training = job.training
    found = {name: value for name, (key, _) in PLAIN.items() if (value := _value(job, key)) is not None}
    # Trainers have rates for vision and projector, and one for the rest, which is the language model.
    found["learning_rate"] = training.learning_rate_of("language")
    for part, name in _RATES.items():
        if (rate := training.learning_rate_of(part)) != found["learning_rate"] and training.mode_of(part) != "frozen":
            found[name] = rate
    # Without an interval, a job has checkpoints and evaluations at the ends of epochs.
    for name, key in EVERY.items():
        every = _value(job, key)
        found[name.replace("_steps", "_strategy")] = "epoch" if every is None else "steps"
        found |= {} if every is None else {name: every}
    if job.evaluation.samples is None and job.evaluation.sources is None:
        found["eval_strategy"] = "no"
    found |= {
        "model_name_or_path": job.model.path,
        "dtype": job.model.dtype,
        "bf16": job.model.dtype == "bfloat16",
        "num_train_epochs": training.epochs,
        "lr_scheduler_type": _schedule(job),
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
        "max_grad_norm": training.clip_norm or 0.0,  # of which 0 is none
    }
    if training.max_steps is not None:
        found["max_steps"] = training.max_steps
    if training.warmup:
        found["warmup_steps" if training.warmup >= 1 else "warmup_ratio"] = (
            int(training.warmup) if training.warmup >= 1 else training.warmup
        )
    return found | _trained(job)


def _value(job: Job, key: str) -> Any:
    value: Any = job
    for name in key.split("."):
        value = getattr(value, name)
    return str(value) if key == "training.output" else value


def _schedule(job: Job) -> str:
    schedule = job.training.schedule
    return "constant_with_warmup" if schedule == "constant" and job.training.warmup else schedule


def _trained(job: Job) -> dict[str, Any]:
    """Return the adapters and the frozen parts."""
    lora = job.training.lora
    frozen = {f"freeze_{part}": job.training.mode_of(part) == "frozen" for part in PARTS}
    if lora.rank is None:
        return {"finetuning_type": "full", **frozen}
    return {
        "finetuning_type": "lora",
        **frozen,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "lora_target": list(lora.targets) if lora.targets else _EVERYTHING,
    }


def tuned(job: Job) -> dict[str, Any]:
    """Return what is trained as arguments that say `tune` where others say `freeze`, and `lora_enable`."""
    settings = _trained(job)
    return {f"tune_{part}": not settings[f"freeze_{part}"] for part in PARTS} | {
        "lora_enable": settings["finetuning_type"] == "lora"
    }


def check_mergers(job: Job, family: str, title: str) -> None:
    """Raise ExportError where a trainer takes mergers of Qwen3-VL, which are of the projector, for the vision tower."""
    vision, projector = (job.training.mode_of(part) for part in ("vision", "projector"))
    if family.startswith("qwen3_vl") and vision != projector:
        raise ExportError(
            f"training: the vision tower is {vision} and the projector {projector}; {title} would train the deepstack "
            f"mergers of {family} as the vision tower; train both alike, or export to ms-swift"
        )


def weighting_left_out(job: Job) -> Iterator[str]:
    """Yield that every target token counts alike where the job weights them otherwise."""
    if job.training.loss_weighting != "token":
        yield f"training.loss_weighting: {job.training.loss_weighting}; every target token counts alike there"


def mean_left_out(averaged: int) -> Iterator[str]:
    """Yield that the loss of a step is the mean of that many means, each over the target tokens of a micro-batch."""
    if averaged > 1:
        yield (
            f"the mean over all target tokens of a step: the loss is the mean of {averaged} micro-batches there, so "
            "that a token of a micro-batch with few of them counts more"
        )


def learning_left_out(job: Job, averaged: int = 1) -> Iterator[str]:
    """Yield in what the loss and the trained parts are otherwise; see `mean_left_out` for `averaged`."""
    yield from mean_left_out(averaged)
    yield from weighting_left_out(job)
    if job.training.lora.rank is not None and job.training.lora.train_projector:
        yield "training.lora.train_projector: the projector's own weights do not train along with the adapters there"


def not_carried(job: Job) -> Iterator[str]:
    """Yield what no trainer takes over from the job, and what that changes."""
    training = job.training
    if training.curriculum.steps:
        yield f"training.curriculum: the first {training.curriculum.steps} steps are of all samples there"
    if training.compile:
        yield "training.compile: layers are not compiled there"
    if training.loggers:
        yield f"training.loggers: {', '.join(training.loggers)}; name them in the trainer's own way"
    if job.model.weights == "random":
        yield "model.weights: random; the trainer reads the weights in the model's folder"
    yield "the loss on labelled rows alone, and the kernels of this engine: the trainer has its own"
