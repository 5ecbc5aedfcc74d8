"""Jobs: the training that the user wants. `autotune.job_file` reads them from YAML; the ranks get them as JSON."""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias, get_args

from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from trials.hardware_section import HardwareSection
from trials.sampling import MOST_REPEATS, PATTERN
from trials.section import Seconds, Section
from trials.workload import Part

LearningRate = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
PARTS: tuple[Part, ...] = get_args(Part)
TrainedAs: TypeAlias = Literal["whole", "adapters", "frozen"]
ScheduleName: TypeAlias = Literal["constant", "linear", "cosine"]
LossWeighting: TypeAlias = Literal["token", "sample", "square"]


class ModelSection(Section):
    path: Annotated[str, Field(min_length=1)]
    """Local folder, relative to the job file, or hub id."""
    weights: Literal["random", "pretrained"] = "pretrained"
    """`pretrained` reads the safetensors of the model, `random` draws weights from the training seed."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """`bfloat16` or `float32`."""
    trust_remote_code: bool = False
    """Run code from the model's folder."""


class Source(Section):
    path: Path
    """Annotation file, relative to the job file."""
    images: Path | None = None
    """Folder that image names are relative to; the annotation file's folder when absent."""
    format: str = "auto"
    """Format of the records, such as llava or messages; `auto` detects it from the content."""
    repeat: Annotated[float, Field(gt=0, le=MOST_REPEATS)] = 1.0
    """How often an epoch shows each sample; 0.5 shows a fixed random half."""
    names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Entries of a mixture file to use, `name%50` for a random half of one; all of them when absent."""
    sampling: Annotated[str, Field(pattern=PATTERN)] = "all"
    """Which usable samples of each file take part: all, first:N, end:N or random:N, N a count or a percentage; or
    exactly:N, N samples an epoch, of which a smaller file shows some several times."""


class DataSection(Section):
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Annotation or mixture files. Besides its `path`, a source may have `images`, the folder that image names are
    relative to (else the file's own folder), `format`, `repeat`, `names` and `sampling`."""
    on_error: Literal["skip", "fail"] = "skip"
    """What to do with a line that cannot be trained on: skip it with a warning, or fail."""
    oversize: Literal["own-pack", "truncate", "skip", "fail"] = "own-pack"
    """What to do with a sample above a pack's capacity: give it a pack alone (own-pack), truncate it to `max_tokens`
    before any pack is made, skip it, or fail."""
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    """Tokens that `oversize: truncate` leaves of a sample; the model's context length when absent."""
    workers: Annotated[int, Field(ge=0, le=64)] | None = None
    """Processes per rank that decode images in advance; 0 decodes in the rank itself. When absent, the cores that ranks
    on accelerators leave free, at most 4 per rank."""

    @field_validator("max_tokens")
    @classmethod
    def _only_to_truncate(cls, max_tokens: int | None, info: ValidationInfo) -> int | None:
        if max_tokens is not None and info.data.get("oversize", "truncate") != "truncate":
            raise ValueError("only means something with `oversize: truncate`; set that, or remove max_tokens")
        return max_tokens


class EvaluationSection(Section):
    """Samples on which the loss is measured during the training, and which are not trained on."""

    samples: Annotated[float, Field(gt=0)] | None = None
    """Samples of `data.sources` to hold out of the training: a share below 1, or a whole number."""
    sources: Annotated[tuple[Source, ...], Field(min_length=1)] | None = None
    """Annotation files to evaluate on, instead of samples of `data.sources`."""
    every: Annotated[int, Field(gt=0)] | None = None
    """Steps between evaluations; at the end of each epoch when absent. The end of the training has one in any case."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed by which the held-out samples are drawn; `training.seed` does not change them."""

    @field_validator("samples")
    @classmethod
    def _share_or_count(cls, samples: float | None) -> float | None:
        if samples is not None and samples >= 1 and samples != int(samples):
            raise ValueError(f"must be a share below 1 or a whole number of samples, not {samples:g}; round it")
        return samples

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.samples is not None and self.sources is not None:
            raise ValueError("has both `samples` and `sources`; keep one")
        if self.samples is None and self.sources is None and (self.every is not None or self.seed):
            raise ValueError(
                "has nothing to evaluate on; add `samples`, or `sources`, or remove the section (--set evaluation=null)"
            )
        return self


class LearningRatesSection(Section):
    """Learning rates of parts of the model; a part that is not given has `training.learning_rate`."""

    vision: LearningRate | None = None
    """The vision tower."""
    projector: LearningRate | None = None
    language: LearningRate | None = None
    """Word embedding, language layers, final norm and output projection."""


class LoraSection(Section):
    """Adapters of peft; with them the model's own weights are frozen."""

    rank: Annotated[int, Field(gt=0, le=4096)] | None = None
    """No adapters when absent."""
    alpha: Annotated[int, Field(gt=0)] = 16
    """The output of an adapter is scaled by alpha / rank."""
    parts: Annotated[tuple[Part, ...], Field(min_length=1)] = ("language",)
    """Parts of the model whose layers have adapters: vision, projector, language."""
    targets: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """Linear layers with an adapter, by name or the end of one; all of the parts when absent."""
    train_projector: bool = False
    """Whether the projector's own weights train too; they are saved with the adapter."""
    dropout: float = 0.0
    """Must be 0: dropout masks would depend on packs and stages, so that a plan would change the training."""

    @model_validator(mode="after")
    def _has_a_rank(self) -> Self:
        if self.rank is None and any(
            getattr(self, name) != field.default for name, field in type(self).model_fields.items()
        ):
            raise ValueError("has no rank; give one, such as `rank: 8`, or remove the section")
        return self

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                f"must be 0, not {dropout:g}: dropout masks would depend on the plan, which must not change the "
                "training; remove it"
            )
        return dropout

    @field_validator("train_projector")
    @classmethod
    def _one_way_to_train_the_projector(cls, train_projector: bool, info: ValidationInfo) -> bool:
        if train_projector and "projector" in info.data.get("parts", ()):
            raise ValueError("trains the weights of the projector, which has adapters as well; remove one of the two")
        return train_projector


class CurriculumSection(Section):
    """First steps of a training, of short samples alone (HBP); the others of the epoch follow."""

    steps: Annotated[int, Field(gt=0)] | None = None
    """Steps of short samples; none when absent."""
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    """Most text tokens of a short sample, those of images included."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for name, other in (("steps", "max_tokens"), ("max_tokens", "steps")):
            if getattr(self, name) is None and getattr(self, other) is not None:
                raise ValueError(f"has no {name}; add it, or remove the section")
        return self


class TrainingSection(Section):
    global_batch_samples: Annotated[int, Field(gt=0)] = 32
    """Samples of one optimizer step, kept by every plan within `batch_tolerance`."""
    batch_tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the global batch by which the samples of a step may differ from it, or two samples."""
    step_variance: Annotated[float, Field(ge=1)] = 2.0
    """Most variance between the steps of a plan, of lengths, images, targets and sources, over that of random order."""
    learning_rate: LearningRate = 1e-5
    """Highest learning rate of AdamW; the schedule lowers it."""
    learning_rates: LearningRatesSection = LearningRatesSection()
    """Learning rates of parts of the model, such as {vision: 2.0e-6}."""
    freeze: tuple[Part, ...] = ()
    """Parts of the model whose weights are not trained: vision, projector, language."""
    lora: LoraSection = LoraSection()
    """Adapters that train instead of the model's own weights, such as {rank: 8}."""
    compile: bool = False
    """Whether torch.compile compiles each vision and language layer by itself, in trials and in the training."""
    max_steps: Annotated[int, Field(gt=0)] | None = None
    """Steps after which the training ends, before the end of its epochs."""
    schedule: ScheduleName = "constant"
    """Change of the learning rates after the warm-up: none (constant), or to 0 at the end of the training along a line
    (linear) or half a cosine (cosine)."""
    warmup: Annotated[float, Field(ge=0)] = 0.0
    """Steps in which the learning rates rise from 0: a share of all steps below 1, or a whole number of steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of parameters with at least two dimensions; all others, such as norms and biases, have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Highest norm of the gradient of the whole model; a longer one is scaled down to it."""
    loss_weighting: LossWeighting = "token"
    """What has equal weight in the loss of a step, as in InternVL's `loss_reduction`: every target `token`, every
    `sample`, or between the two (`square`) each token by 1 / sqrt(target tokens of its sample)."""
    curriculum: CurriculumSection = CurriculumSection()
    """First steps of short samples alone, such as {steps: 500, max_tokens: 4096}."""
    epochs: Annotated[int, Field(gt=0)] = 1
    """Passes over the data."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the order, packing, random weights and the search."""
    output: Path = Path("output")
    """Folder for checkpoints and the final model, relative to the job file."""
    checkpoint_every: Annotated[int, Field(gt=0)] | None = None
    """Steps between checkpoints, in place of one at the end of each epoch."""
    keep_checkpoints: Annotated[int, Field(gt=0)] = 2
    """Newest checkpoints to keep; older ones of the same training are removed."""
    loggers: tuple[str, ...] = ()
    """Loggers of the progress, in addition to the console and progress.jsonl: tensorboard, wandb."""

    @field_validator("warmup")
    @classmethod
    def _within_the_training(cls, warmup: float, info: ValidationInfo) -> float:
        if warmup >= 1 and warmup != int(warmup):
            raise ValueError(f"must be a share below 1 or a whole number of steps, not {warmup:g}; round it")
        max_steps = info.data.get("max_steps")
        if max_steps is not None and warmup > max_steps:
            raise ValueError(
                f"{warmup:.0f} steps are more than training.max_steps: {max_steps}; lower it, or raise max_steps"
            )
        return warmup

    @field_validator("curriculum")
    @classmethod
    def _ends_within(cls, curriculum: CurriculumSection, info: ValidationInfo) -> CurriculumSection:
        steps, max_steps = curriculum.steps, info.data.get("max_steps")
        if steps is not None and max_steps is not None and steps > max_steps:
            raise ValueError(
                f"{steps} steps are more than training.max_steps: {max_steps}; lower `steps`, or raise max_steps"
            )
        return curriculum

    @field_validator("freeze")
    @classmethod
    def _leaves_a_part(cls, freeze: tuple[Part, ...], info: ValidationInfo) -> tuple[Part, ...]:
        if len(set(freeze)) < len(freeze):
            raise ValueError(f"names a part twice: {', '.join(freeze)}; name it once")
        if set(freeze) == set(PARTS):
            raise ValueError("freezes every part, so nothing would be trained; leave one out")
        rates = info.data.get("learning_rates")
        for part in freeze:
            if rates is not None and (rate := getattr(rates, part)) is not None:
                raise ValueError(f"freezes {part}, which has a learning rate of {rate:g}; remove one of the two")
        return freeze

    @field_validator("lora")
    @classmethod
    def _agrees(cls, lora: LoraSection, info: ValidationInfo) -> LoraSection:
        if lora.rank is None:
            return lora
        if info.data.get("freeze"):
            raise ValueError("freezes the model's own weights already; remove training.freeze")
        trained = (*lora.parts, *(("projector",) if lora.train_projector else ()))
        rates = info.data.get("learning_rates")
        for part in PARTS:
            if part not in trained and rates is not None and (rate := getattr(rates, part)) is not None:
                raise ValueError(f"freezes {part}, which has a learning rate of {rate:g}; remove that")
        return lora

    def mode_of(self, part: Part) -> TrainedAs:
        """Return how a part is trained."""
        if self.lora.rank is None:
            return "frozen" if part in self.freeze else "whole"
        if part in self.lora.parts:
            return "adapters"
        return "whole" if part == "projector" and self.lora.train_projector else "frozen"

    def learning_rate_of(self, part: Part) -> float:
        """Return the learning rate of a part of the model, before the schedule."""
        own: float | None = getattr(self.learning_rates, part)
        return self.learning_rate if own is None else own


_Some = Field(min_length=1)


class SpaceSection(Section):
    """The searched values of each axis; an axis that is not given has those that the data and the devices allow."""

    layouts: Annotated[tuple[str, ...], _Some] | None = None
    """Pipeline and data degree, a tensor degree above 1, the ZeRO stage, and the data ranks that average gradients
    first if there are several, like p2-d4-z1, p2-d1-t4-z1 or p1-d8-z1-w4."""
    packers: Annotated[tuple[str, ...], _Some] | None = None
    """Packers to try, such as best-fit."""
    qv: Annotated[tuple[Annotated[int, Field(gt=0, lt=2**31)], ...], _Some] | None = None
    """Most vision units of a pack."""
    qt: Annotated[tuple[Annotated[int, Field(gt=0, lt=2**31)], ...], _Some] | None = None
    """Most text tokens of a pack."""
    qv_slack: Annotated[tuple[Annotated[int, Field(ge=0)], ...], _Some] = (0, 1, 2)
    """Vision units below qv at which a pack still counts as full; the usual slack first."""
    qt_slack: Annotated[tuple[Annotated[int, Field(ge=0)], ...], _Some] = (64, 0, 32, 128, 256)
    """Text tokens below qt at which a pack still counts as full; the usual slack first."""
    sequence: Annotated[tuple[Annotated[str, Field(pattern=r"^[1-9]\d*(-[1-9]\d*)*$")], ...], _Some] | None = None
    """Sequence degrees of the levels of packs: `1` is one level on single ranks, `1-4` two levels, of which 4 ranks
    share the packs of the second; when absent, those that may help the data."""
    split: Annotated[tuple[Annotated[int, Field(gt=0)], ...], _Some] | None = None
    """Layers of each pipeline stage, vision layers first; searched when absent."""
    recompute: Annotated[
        Annotated[Literal["fit", "all", "none"], Tag("word")]
        | Annotated[tuple[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], ...], _Some, Tag("counts")],
        Discriminator(lambda value: "counts" if isinstance(value, list | tuple) else "word"),
    ] = "fit"
    """Which layers are recomputed: searched around those that the memory requires (fit), all, none, or
    [vision, language] of each stage, with a given split."""
    boundary_shift: Annotated[int, Field(ge=0)] = 2
    """Layers by which a sampler without predictions moves the stage boundaries."""
    recompute_shift: Annotated[int, Field(ge=0)] = 2
    """Layers of each kind and stage that such a sampler recomputes in addition to those that the memory requires."""


class SearchSection(Section):
    trials: Annotated[int, Field(gt=0)] = 24
    """Most trials to run."""
    time_limit: Seconds = 600.0
    """Longest time for trials, with repeats. The fastest baseline and a round of repeats run in any case."""
    device_hours: Annotated[float, Field(gt=0)] | None = None
    """Most hours of all devices together, such as GPU-hours; only `time_limit` counts when absent."""
    objectives: Annotated[tuple[Literal["time", "memory", "energy"], ...], _Some] = ("time",)
    """What plans are compared by: time, memory (peak bytes of the rank that needs most), and energy where devices count
    it. The winner is the fastest."""
    current_plan: Path | None = None
    """File of the plan that trainings use now, relative to the job file: one more baseline."""
    queue: tuple[Path, ...] = ()
    """Files of plans to try before all others, relative to the job file."""
    sampler: str = "model"
    """What proposes the plans to try: model, tpe, gp, uniform or exhaustive, or hub:NAME of OptunaHub."""
    warmup_steps: Annotated[int, Field(ge=0)] = 1
    """Steps of a trial that are run and not timed."""
    timed_steps: Annotated[int, Field(gt=0)] = 5
    """Most steps of a trial that are timed."""
    step_error: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Fewer steps are timed once the error of their mean is below this share."""
    confirm_rounds: Annotated[int, Field(gt=0)] = 3
    """Most repeats of each finalist, in turns."""
    final_steps: Annotated[int, Field(ge=0)] = 40
    """Most steps of the last trial, which measures the winner longer where time is left; no such trial where this
    is 0, or not above `timed_steps`."""
    trial_timeout: Seconds = 300.0
    """A trial without a result after this time is ended; the start of its processes does not count."""
    space: SpaceSection = SpaceSection()
    """The searched values of each axis, such as {layouts: [p1-d8-z1, p2-d4-z1]}."""
    parallel: Annotated[int, Field(gt=0)] = 1
    """Trials that run at the same time, each on `hardware.devices` devices of its own."""
    workers: Literal["warm", "fresh"] = "warm"
    """Rank processes that serve many trials (warm), or new ones for each trial (fresh)."""

    @field_validator("objectives")
    @classmethod
    def _time_among(cls, objectives: tuple[str, ...]) -> tuple[str, ...]:
        if "time" not in objectives:
            raise ValueError("the winner is the fastest plan, so `time` has to be among them; add it")
        return objectives


class Job(Section):
    model: ModelSection
    data: DataSection
    evaluation: EvaluationSection = EvaluationSection()
    """Samples on which the loss is measured during the training, such as {samples: 0.02}; none when absent."""
    hardware: HardwareSection = HardwareSection()
    training: TrainingSection = TrainingSection()
    search: SearchSection = SearchSection()
    database: str | None = None
    """Database URL; the user's own SQLite file when absent."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """All sources: those to train on, then those to evaluate on."""
        return (*self.data.sources, *(self.evaluation.sources or ()))
