"""What the user wants to train. `autotune.job_file` reads it from YAML; the ranks get it as JSON."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from trials.data.sampling import PATTERN
from trials.units import parse_bytes, parse_seconds

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class ModelSection(_Section):
    path: Annotated[str, Field(min_length=1)]
    """Local folder, relative to the job file, or hub id."""
    weights: Literal["random", "pretrained"] = "pretrained"
    """`random` draws them from the training seed."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    trust_remote_code: bool = False
    """Run code from the model's folder. Never on by itself."""


class Source(_Section):
    path: Path
    """Annotation file, relative to the job file."""
    images: Path | None = None
    """Folder that image names are relative to; the annotation file's folder when absent."""
    format: str = "auto"
    """Module of `trials.data.formats`, or `auto`."""
    repeat: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How often an epoch shows each sample; 0.5 shows a fixed random half."""
    names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Entries of a mixture file to use, `name%50` for a random half of one; all of them when absent."""
    sampling: Annotated[str, Field(pattern=PATTERN)] = "all"
    """Which usable samples of each file take part: all, first:N, end:N or random:N, N a count or a percentage."""


class DataSection(_Section):
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    on_error: Literal["skip", "fail"] = "skip"
    """What to do with a line that cannot be trained on."""
    oversize: Literal["own-pack", "truncate", "skip", "fail"] = "own-pack"
    """What to do with a sample above a pack's capacity; `truncate` cuts it to `max_tokens` before any pack is made."""
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    """Tokens that `oversize: truncate` leaves of a sample; the model's context length when absent."""
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes per rank that decode images ahead; 0 decodes in the rank itself."""

    @field_validator("max_tokens")
    @classmethod
    def _only_to_truncate(cls, max_tokens: int | None, info: ValidationInfo) -> int | None:
        if max_tokens is not None and info.data.get("oversize", "truncate") != "truncate":
            raise ValueError("only means something with `oversize: truncate`; set that, or take max_tokens out")
        return max_tokens


class HardwareSection(_Section):
    devices: Annotated[int, Field(gt=0)] | None = None
    """Ranks to use; every visible accelerator when absent, else 2 CPU ranks."""
    memory_limit: Bytes | None = None
    """Per rank; the device's memory less a reserve when absent."""


class TrainingSection(_Section):
    global_batch_samples: Annotated[int, Field(gt=0)] = 32
    """Samples of one optimizer step, kept within 10 % by every plan."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    epochs: Annotated[int, Field(gt=0)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    output: Path = Path("output")
    """Folder for checkpoints and the final model, relative to the job file."""
    checkpoint_every: Annotated[int, Field(gt=0)] | None = None
    """Steps between checkpoints; only at the end of each epoch when absent."""


class SearchSection(_Section):
    trials: Annotated[int, Field(gt=0)] = 24
    """Most trials to run."""
    time_limit: Seconds = 600.0
    """Most seconds to search, confirmation included."""
    sampler: str = "tpe"
    """Module of `autotune.search.samplers`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 1
    """Steps of a trial that are run and not timed."""
    timed_steps: Annotated[int, Field(gt=0)] = 3
    """Steps of a trial that are timed."""
    confirm_rounds: Annotated[int, Field(gt=0)] = 2
    """How often the finalists are repeated, in turns."""
    trial_timeout: Seconds = 300.0
    """A trial without a result after this is ended."""
    workers: Literal["warm", "fresh"] = "warm"
    """Whether rank processes serve many trials, or each trial has new ones."""


class Job(_Section):
    model: ModelSection
    data: DataSection
    hardware: HardwareSection = HardwareSection()
    training: TrainingSection = TrainingSection()
    search: SearchSection = SearchSection()
    database: str | None = None
    """Database URL; the user's own SQLite file when absent."""
