"""Settings that decide the steps of a training: a resumed training must have the same."""

import logging
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trials.data.index import DatasetIndex
from trials.data.order import epoch_order
from trials.data.steps.arrangement import ARRANGEMENT_VERSION
from trials.errors import OutputTaken
from trials.model.identity import config_digest
from trials.model.skeleton import load_config
from trials.model.weights import weights_fingerprint
from trials.tasks.request import Request

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values on which the steps of a training depend."""

    plan: str
    """Id of the plan: another plan packs the samples into other steps."""
    data: str
    """Digest of what the steps depend on of the dataset: lengths, repeats and files of its samples."""
    model: str
    """Digest of the configuration."""
    weights: str
    """`random`, or the fingerprint of the weights from which the training started."""
    dtype: str
    seed: int
    global_batch_samples: int
    oversize: str
    learning_rate: float
    epochs: int
    # Records of trainings before these settings lack the fields below.
    learning_rates: dict[str, float] = field(default_factory=dict)
    """Learning rates of parts of the model that have their own."""
    max_steps: int | None = None
    schedule: str = "constant"
    warmup: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float | None = None
    evaluation_samples: float | None = None
    """Samples of the data that are held out: others would have been trained on before."""
    evaluation_seed: int = 0
    evaluation_data: str | None = None
    """Digest of the lengths of the held-out samples, whose losses stand in one file; None where there are none."""
    freeze: tuple[str, ...] = ()
    """Frozen parts, whose weights no checkpoint holds."""
    lora: dict[str, Any] | None = None
    loss_weighting: str = "token"
    """What the losses of the steps mean, which stand in one file."""
    curriculum: dict[str, Any] | None = None
    """The samples of the first steps."""
    arrangement_version: int = 1
    """Version of the arrangement of packs into steps, `ARRANGEMENT_VERSION`."""
    batch_tolerance: float = 0.1
    step_variance: float = 2.0

    def evaluated_as(self, other: "Settings") -> "Settings":
        """Return the settings with the held-out samples of `other` where they have none, which mixes with any."""
        return replace(self, evaluation_data=self.evaluation_data or other.evaluation_data)


MAY_CHANGE = (
    "learning_rate",
    "epochs",
    "learning_rates",
    "max_steps",
    "schedule",
    "warmup",
    "weight_decay",
    "betas",
    "clip_norm",
)
"""Settings that a resumed training takes from its job: they change neither the samples of a step nor their order."""


_DIGESTS = {
    "data": " (digests of the lengths, repeats and files of its samples)",
    "model": " (digests of its configuration)",
    "weights": " (digests of its weights before the training)",
}
"""What the settings are that only a digest is kept of."""


def training_settings(request: Request, index: DatasetIndex) -> Settings:
    """Return the settings of the requested training on the samples of an index."""
    job, model = request.job, request.job.model
    config = load_config(model.path, trust_remote_code=model.trust_remote_code)
    return Settings(
        plan=request.plan.id,
        data=index.steps_digest,
        model=config_digest(config),
        weights="random" if model.weights == "random" else weights_fingerprint(Path(model.path)),
        dtype=model.dtype,
        seed=job.training.seed,
        global_batch_samples=job.training.global_batch_samples,
        oversize=job.data.oversize,
        learning_rate=job.training.learning_rate,
        epochs=job.training.epochs,
        learning_rates=job.training.learning_rates.model_dump(exclude_none=True),
        max_steps=job.training.max_steps,
        schedule=job.training.schedule,
        warmup=job.training.warmup,
        weight_decay=job.training.weight_decay,
        betas=job.training.betas,
        clip_norm=job.training.clip_norm,
        evaluation_samples=job.evaluation.samples,
        evaluation_seed=job.evaluation.seed if job.evaluation.samples else 0,
        evaluation_data=_evaluation_digest(request),
        freeze=tuple(sorted(job.training.freeze)),
        lora=job.training.lora.model_dump(mode="json") if job.training.lora.rank else None,
        loss_weighting=job.training.loss_weighting,
        curriculum=job.training.curriculum.model_dump() if job.training.curriculum.steps else None,
        arrangement_version=ARRANGEMENT_VERSION,
        batch_tolerance=job.training.batch_tolerance,
        step_variance=job.training.step_variance,
    )


def _evaluation_digest(request: Request) -> str | None:
    if request.held_out is None:
        return None
    index = DatasetIndex.load(request.held_out)
    return index.keep(np.sort(epoch_order(index, request.job.evaluation.seed, 0))).each_once.digest


def check_fixed(folder: Path, then: Settings, now: Settings) -> None:
    """Raise OutputTaken where the settings of the training in `folder` were others that may not change."""
    changed = _changed(then, now)
    others = changed.pop("evaluation_data", None)
    fixed = [
        f"{name} {old}, not {new}{_DIGESTS.get(name, '')}"
        for name, (old, new) in changed.items()
        if name not in MAY_CHANGE
    ]
    if fixed:
        other = ""
        if then.plan != now.plan:
            other = f", as by `--plan {then.plan}`, or change its plan with `--resume-with {now.plan}`"
        raise OutputTaken(
            f"training.output {folder} belongs to a training with {'; '.join(fixed)}; "
            f"name another folder, or go back to those {'files and ' * bool(_DIGESTS.keys() & changed)}settings{other}"
        )
    if others:
        raise OutputTaken(
            f"training.output {folder} belongs to a training with other samples of evaluation, so that their losses "
            "cannot be compared; go back to those samples, leave evaluation.sources out to train on without "
            "evaluations, or name another folder"
        )


def check_changes(folder: Path, then: Settings, now: Settings) -> None:
    """Raise what `check_fixed` raises, and log settings that may change, and have, as warnings."""
    check_fixed(folder, then, now)
    changed = _changed(then, now)
    for name, (old, new) in changed.items():
        after = f"no {name}" if new is None else f"{name} {new}"
        before = "had none" if old is None else f"was {old}"
        _log.warning("%s: the training continues with %s; it %s before", folder, after, before)
    # A warm-up below 1 is a share of all steps.
    follows_steps = now.schedule != "constant" or 0 < now.warmup < 1
    if changed.keys() & {"schedule", "warmup"} or (follows_steps and changed.keys() & {"epochs", "max_steps"}):
        _log.warning(
            "%s: the schedule %s, with training.warmup: %g, is laid over the new number of steps, so that the learning "
            "rate may jump here",
            folder,
            now.schedule,
            now.warmup,
        )


def _changed(then: Settings, now: Settings) -> dict[str, tuple[Any, Any]]:
    """Return (value then, value now) of the settings that differ."""
    then, now = then.evaluated_as(now), now.evaluated_as(then)
    return {
        field.name: (getattr(then, field.name), getattr(now, field.name))
        for field in fields(Settings)
        if getattr(then, field.name) != getattr(now, field.name)
    }
