"""The input of `autotune pack INPUT`: lengths of a job's data or of a file, and the settings to pack them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.errors import PackError
from autotune.events import Listener, unheard
from autotune.held_out import hold_out, without_records
from autotune.job_file import JobFile
from trials import plugins
from trials.arrays import Ints
from trials.data import formats
from trials.data.epoch import BEST, CostWeights, EpochSettings
from trials.data.index import DatasetIndex
from trials.data.indexing import IndexReport, build_index
from trials.data.pack_cost import cost_weights, forward_weights
from trials.data.packers import PACKERS
from trials.data.packs import Oversize
from trials.errors import DataError
from trials.job import DataSection, Job, ModelSection, Source, TrainingSection
from trials.model.hub import folder_of, published_name

DATA_PARALLEL = 8
"""Data ranks where the job names no devices; the papers measure their ratios on 8."""
_GLOBAL_BATCH_SAMPLES = 128
"""Global batch for a file of lengths, which has no job."""
_FORMAT, _SHAPE = "lengths", '[{"vit_num": 5, "token_num": 1341}, ...]'
JOBS, _LENGTHS = (".yaml", ".yml"), (".json", ".jsonl")
"""Suffixes of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """Options that replace settings of the input; None keeps those, or chooses by the data."""

    qv: int | None = None
    qt: int | None = None
    qv_min: int | None = None
    qt_min: int | None = None
    packer: str | None = None
    data_parallel: int | None = None
    global_batch_samples: int | None = None
    seed: int | None = None
    epoch: int = 0
    oversize: Oversize | None = None
    model: str | None = None
    """Folder or hub id of the model whose cost counts; for lengths alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Material:
    """Lengths, and the settings of the training that packs them."""

    path: Path
    index: DatasetIndex
    found: IndexReport
    settings: EpochSettings
    forward: CostWeights
    """Floating-point operations of the forward pass, which runs all parts. Those of `settings`, by which packs are
    matched, are of all passes over what trains."""
    cost_model: str
    """Name of the model whose cost the weights describe."""
    data_parallel: int
    held_out: Ints
    """Records that are not trained on, for the evaluation, as `DatasetIndex.record` counts them."""

    @property
    def cut(self) -> int:
        """Samples of exactly as many tokens as longer ones were cut to; 0 where none is cut."""
        return int(np.count_nonzero(self.index.text_tokens == self.found.max_tokens))


def read_material(file: JobFile, wanted: PackOptions, listener: Listener = unheard) -> Material:
    """Read the data of a job (YAML), or lengths (JSON), without using devices or a database.

    Raise PackError for other files, JobError for a job that cannot be used,
    ModelError for its model, and what `build_index` and `check_media` raise.
    """
    path = file.path
    if not path.is_file():
        raise PackError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; give a job file or lengths")
    if path.suffix in JOBS:
        return job_material(file.job, path, wanted, listener)
    if file.changes:
        raise PackError(f"{path}: --set replaces values of a job, and this is none; remove --set {file.changes[0]}")
    if path.suffix in _LENGTHS:
        return _lengths_material(path, wanted, listener)
    kinds = ", ".join((*JOBS, *_LENGTHS))
    raise PackError(
        f"{path}: {path.suffix or 'a name without suffix'} is not a supported kind of file; give one of {kinds}"
    )


def _check(wanted: PackOptions) -> None:
    """Check the options before the data is read."""
    if wanted.packer not in (None, BEST, *plugins.names(PACKERS)):
        known = ", ".join((BEST, *plugins.names(PACKERS)))
        raise PackError(f"--packer {wanted.packer} is not one of the packers here: {known}")
    for name, least, most in (("qv", wanted.qv_min, wanted.qv), ("qt", wanted.qt_min, wanted.qt)):
        if least is not None and most is not None and least > most:
            raise PackError(f"--{name}-min {least} is above --{name} {most}; lower the first or raise the second")


def job_material(
    job: Job, path: Path, wanted: PackOptions, listener: Listener = unheard, *, held_out: Ints | None = None
) -> Material:
    """Read the data of a job; `path` names it in reports. Raise like `read_material`.

    `held_out` are the records to hold out in place of those that the job draws.
    """
    # These import torch, which packing a file of lengths does not need.
    from autotune.data_problems import check_media  # noqa: PLC0415
    from autotune.folders import lengths_folder  # noqa: PLC0415
    from trials.model.inputs.encoders import load_measurer  # noqa: PLC0415

    _check(wanted)
    if wanted.model is not None:
        raise PackError(f"--model applies only to a file of lengths; {path} is a job, which names its own model")
    data = job.data.model_copy(update={"oversize": wanted.oversize or job.data.oversize})
    weights, forward, name = _model_weights(job.model, job.training)
    measurer = load_measurer(job.model, data)
    index, found = build_index(data, measurer, Path(), listener, cache=lengths_folder())
    check_media(found, measurer)
    trained = hold_out(index, job.evaluation)[0] if held_out is None else without_records(index, held_out)
    return Material(
        path=path,
        index=trained,
        found=found,
        settings=EpochSettings(
            global_batch_samples=wanted.global_batch_samples or job.training.global_batch_samples,
            weights=weights,
            seed=job.training.seed if wanted.seed is None else wanted.seed,
            oversize=data.oversize,
            batch_tolerance=job.training.batch_tolerance,
            step_variance=job.training.step_variance,
        ),
        forward=forward,
        cost_model=name,
        data_parallel=wanted.data_parallel or job.hardware.devices or DATA_PARALLEL,
        held_out=np.setdiff1d(index.record, trained.record),
    )


def _lengths_material(path: Path, wanted: PackOptions, listener: Listener) -> Material:
    _check(wanted)
    data = DataSection(sources=(Source(path=path.absolute()),), oversize=wanted.oversize or "own-pack")
    _check_lengths(data.sources[0])
    weights, name, model = paper_weights(), NAME, wanted.model and folder_of(wanted.model)
    if model is not None:
        _, weights, name = _model_weights(ModelSection(path=model), TrainingSection())
    if data.oversize == "truncate":
        data = data.model_copy(update={"max_tokens": _context(data, model)})
    index, found = build_index(data, None, Path(), listener)
    return Material(
        path=path,
        index=index,
        found=found,
        settings=EpochSettings(
            global_batch_samples=wanted.global_batch_samples or _GLOBAL_BATCH_SAMPLES,
            weights=weights,
            seed=wanted.seed or 0,
            oversize=data.oversize,
        ),
        forward=weights,
        cost_model=name,
        data_parallel=wanted.data_parallel or DATA_PARALLEL,
        held_out=np.empty(0, dtype=np.int64),
    )


def _check_lengths(source: Source) -> None:
    """Raise PackError for a file that holds more than lengths."""
    try:
        files = formats.resolve(source, Path())
    except DataError as error:  # its remedy names keys of the job file
        what, _, _ = str(error).partition("; ")
        raise PackError(f"{what}; give {_SHAPE}, OmniBal's meta file of such files, or a job file") from error
    for file in files:
        if file.format != _FORMAT:
            raise PackError(
                f"{file.path} holds conversations ({file.format}), whose lengths depend on the model; give a job file, "
                "which names both"
            )


def _context(data: DataSection, model: str | None) -> int | None:
    """Return the tokens that samples are cut to, which only a model defines."""
    if model is None:
        raise PackError("--oversize truncate cuts to the model's context length; name one with --model")
    from trials.model.inputs.encoders import token_limit  # noqa: PLC0415
    from trials.model.skeleton import load_config  # noqa: PLC0415

    return token_limit(data, load_config(model))


def _model_weights(settings: ModelSection, training: TrainingSection) -> tuple[CostWeights, CostWeights, str]:
    """Return the model's analytic cost in a training and in a forward pass, which needs no weights, and its name."""
    from autotune.model_shape import model_shape  # noqa: PLC0415
    from autotune.packing.rough_cost import rough_weights  # noqa: PLC0415
    from trials.model.family import find_family  # noqa: PLC0415
    from trials.model.skeleton import load_config  # noqa: PLC0415

    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    if not find_family(config):
        rough = rough_weights(config)
        return rough, rough, f"{Path(published_name(settings.path)).name} (roughly, from its parameters)"
    # The shape follows from the configuration: a folder without weights is enough for packing.
    shape = model_shape(settings.model_copy(update={"weights": "random"}), training)
    return cost_weights(shape), forward_weights(shape), shape.name


NAME = "OmniBal's InternViT-6B + InternLM2-20B"

_VISION_LAYERS, _VISION_HIDDEN, _VISION_MLP = 45, 3200, 12800
_VISION_TOKENS = (448 // 14) ** 2 + 1
"""Patches of a tile, and the class token."""
_IMAGE_TOKENS = 256
"""Of a tile in the language model: each has the states of 4 patches, joined."""
# From the published configurations of InternViT-6B, above, and InternLM2-20B.
_LAYERS, _HIDDEN, _MLP = 48, 6144, 16384
_HEADS, _KEY_HEADS = 48, 8
_VOCABULARY = 92_544


def paper_weights() -> CostWeights:
    """Return the forward floating-point operations, counted as `autotune.model_shape` counts those of other models.

    A matrix of n parameters costs 2 n per token, attention 4 n^2 h per layer on n tokens, half of it where it is causal
    (Megatron-LM, appendix). The patch embedding and the norms, 0.1 % of a tile, are left out.
    """
    vision = _VISION_LAYERS * (4 * _VISION_HIDDEN**2 + 2 * _VISION_HIDDEN * _VISION_MLP)
    vision_attention = 4 * _VISION_LAYERS * _VISION_TOKENS**2 * _VISION_HIDDEN
    projector = 4 * _VISION_HIDDEN * _HIDDEN + _HIDDEN**2
    attention = 2 * _HIDDEN**2 * (1 + _KEY_HEADS / _HEADS)
    language = _LAYERS * (attention + 3 * _HIDDEN * _MLP)
    return CostWeights(
        unit=float(2 * vision * _VISION_TOKENS + vision_attention + 2 * projector * _IMAGE_TOKENS),
        token=2 * language,
        target=float(2 * _VOCABULARY * _HIDDEN),
        square=float(2 * _LAYERS * _HIDDEN),
    )
