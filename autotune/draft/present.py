"""The present settings of another trainer as far as a plan has them: micro-batches, ZeRO, checkpointing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from autotune.draft.arguments import Arguments, document_of
from autotune.draft.given import Given, count, flag
from autotune.errors import JobError
from trials.plan import MOST_UNITS, SIMPLE_PACKER, Packed, Padded, ZeroStage
from trials.strict_yaml import NotYaml
from trials.units import number_of

PACKED = ("packing", "neat_packing", "use_packed_ds", "data_packing", "sample_packing")
"""Arguments with which a sample of a micro-batch is a pack of them."""
_FLAT = ("padding_free", "data_flatten", "batch_flattening")
"""Arguments with which the samples of a micro-batch are joined without padding."""
_GROUPED = ("group_by_length", "group_by_modality_length", "group_by_modality_length_auto")
DEGREES = (
    "tensor_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel_size",
    "sequence_parallel_degree",
    "deepspeed_autotp_size",
)
"""Arguments that say how many devices compute the same samples together."""
_KNOWN = {"per_device_train_batch_size", "gradient_checkpointing", "deepspeed", "fsdp", *PACKED, *_FLAT, *_GROUPED}
"""Arguments without whose value there is no plan."""
_STAGE = re.compile(r"(?:zero|z)[_-]?(?:stage)?[_-]?([0-3])(?!\d)")
"""ZeRO stage in names of DeepSpeed configurations, such as zero3 or ds_z2_config."""
_FSDP: dict[str, ZeroStage] = {"full_shard": 3, "shard_grad_op": 2}
"""ZeRO stage by the name of the sharding strategy of FSDP (torch's `ShardingStrategy`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """All of a plan but the layers of the model. Ranks are in data parallelism alone."""

    packing: Padded | Packed
    zero: ZeroStage
    checkpoint_vision: bool
    checkpoint_language: bool
    remarks: tuple[str, ...] = ()
    """Where the plan is not to the letter what the configuration says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclear:
    """Settings that no plan expresses, or that the configuration does not say."""

    reasons: tuple[str, ...]


def present_of(given: Given, arguments: Arguments) -> Present | Unclear:
    """Return the settings for a plan, or why there is none. The arguments stay among those left to the search.

    Nothing is approximated by a slower plan: the gain over it would not be one over the present training.
    """
    remarks: list[str] = []
    packing = _packing(given, remarks)
    zero = _zero(given, arguments, remarks)
    vision, language = _checkpointed(given)
    found = (packing, zero, vision, language)
    reasons = [each for each in (*found, *_beyond(given)) if isinstance(each, str)]
    if unknown := sorted(_KNOWN & (given.unknown | given.automatic)):
        reasons = [f"the configuration does not say {', '.join(unknown)}"]
    if reasons:
        return Unclear(reasons=tuple(dict.fromkeys(reasons)))
    assert not isinstance(packing, str)
    return Present(
        packing=packing,
        zero=cast(ZeroStage, zero),
        checkpoint_vision=vision is True,
        checkpoint_language=language is True,
        remarks=tuple(remarks),
    )


def _packing(given: Given, remarks: list[str]) -> Padded | Packed | str:
    """Return the micro-batches, or why none of a plan are like them."""
    samples = given.look("per_device_train_batch_size", count)
    own = own_packs(given)
    apart = given.take("packs_are_apart", flag)
    given.take("pack_tokens", count), given.take("pack_units", count)
    packed = next((name for name in PACKED if given.look(name, flag)), None)
    flat = next((name for name in _FLAT if given.look(name, flag)), None)
    grouped = next((name for name in _GROUPED if given.look(name, flag)), None)
    if not samples:
        return "the samples of a micro-batch are not given"
    if packed:
        if own is None or apart is False:
            return f"{packed}: such packs, or packs without a length, are not those of a plan"
        if samples > 1:
            remarks.append(f"{samples} packs of {own.qt} tokens in a micro-batch are one pack of {samples * own.qt}")
        return _full(min(samples * own.qv, MOST_UNITS), samples * own.qt)
    if flat and samples > 1:
        return f"{flat}: a plan pads micro-batches of {number_of(samples, 'sample')}, or limits them by tokens"
    if grouped:
        return f"{grouped}: a plan does not group samples by length"
    return Padded(samples=samples)


def own_packs(given: Given) -> Packed | None:
    """Return the packs that the trainer makes; None where it makes none, or their length is not known."""
    tokens, units = given.look("pack_tokens", count), given.look("pack_units", count)
    return _full(units or MOST_UNITS, tokens) if tokens else None


def _full(qv: int, qt: int) -> Packed:
    return Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt, packer=SIMPLE_PACKER)


def _zero(given: Given, arguments: Arguments, remarks: list[str]) -> int | str:
    """Return the ZeRO stage, or why it is none of a plan's."""
    own = given.take("zero_stage", count)
    configuration, sharding = given.look("deepspeed", _any), given.look("fsdp", _any)
    if own is not None:
        return own if own in get_args(ZeroStage) else f"ZeRO {own} does not exist"
    if configuration is not None:
        return _stage_of(configuration, remarks)
    if sharding or given.look("fsdp_config", _any):
        names = [name for name in _FSDP if name in str(sharding)]
        return _FSDP[names[0]] if len(names) == 1 else "fsdp: only full_shard and shard_grad_op are like a plan's ZeRO"
    if arguments.starts("accelerate") or given.look("accelerate_config", _any):
        return "the configuration of accelerate, which was not read, may name a ZeRO stage"
    return 0


def _stage_of(configuration: object, remarks: list[str]) -> int | str:
    """Return the stage of a DeepSpeed configuration: an object, a file, or a name that has it."""
    if isinstance(configuration, str):
        file = Path(configuration)
        if not file.is_file():
            found = _STAGE.search(file.stem)
            if found is None or "offload" in file.stem:
                return f"deepspeed: {configuration} is not here, and no stage without offload is in its name"
            remarks.append(f"ZeRO {found[1]} is by the name {configuration}, which is no file here")
            return int(found[1])
        configuration = _content(file)
    zero = configuration.get("zero_optimization", {}) if isinstance(configuration, dict) else None
    if not isinstance(zero, dict):
        raise JobError(f"deepspeed: {configuration!r:.60} has no object zero_optimization; correct it")
    offloads = [name for name in ("offload_optimizer", "offload_param") if _device(zero.get(name)) != "none"]
    if offloads:
        return f"{offloads[0]}: a plan keeps weights and optimizer on the devices"
    stage = zero.get("stage", 0)
    return stage if stage in get_args(ZeroStage) else f"zero_optimization.stage: {stage!r:.20} is none of a plan's"


def _content(file: Path) -> object:
    try:
        return document_of(file, file.read_bytes()).value
    except (OSError, NotYaml) as error:
        raise JobError(f"deepspeed: {file} cannot be read: {error}") from error


def replaced_by_deepspeed(given: Given) -> Iterator[str]:
    """Yield which arguments have no effect because DeepSpeed's own configuration has a schedule or an optimizer."""
    configuration = given.look("deepspeed", _any)
    if isinstance(configuration, str) and Path(configuration).is_file():
        configuration = _content(Path(configuration))
    if not isinstance(configuration, dict):
        return
    for key, keys in (("scheduler", "training.schedule and training.warmup"), ("optimizer", "training.learning_rate")):
        section = configuration.get(key)
        kind = section.get("type") if isinstance(section, dict) else None
        # transformers checks that an AdamW there has the values of the arguments.
        if kind and str(kind).lower() not in ("adam", "adamw"):
            yield f"deepspeed: {key}.type: {kind} replaces that of the arguments there; check {keys}"


def _device(offload: object) -> object:
    return offload.get("device", "cpu") if isinstance(offload, dict) else "none"


def _checkpointed(given: Given) -> tuple[bool | str, bool | str]:
    """Return whether vision and language layers are recomputed, or why that is none of a plan's ways."""
    usual = given.look("gradient_checkpointing", _any)
    vision, language = (given.take(f"checkpoint_{tower}", _any) for tower in ("vision", "language"))
    language = usual if language is None else language
    return _switch(language if vision is None else vision), _switch(language)


def _switch(value: object) -> bool | str:
    try:
        return flag(False if value is None else value)
    except ValueError:
        return f"gradient checkpointing {value!r:.80}: a plan has it on or off"


def _beyond(given: Given) -> Iterator[str]:
    """Yield further settings that no plan has in data parallelism alone."""
    for name in DEGREES:
        if (given.look(name, count) or 1) > 1:
            yield f"{name}: such a split is not made by `init`"
    if given.look("activation_offloading", flag):
        yield "activation_offloading: the plan of `init` offloads nothing"


def _any(value: Any) -> Any:
    return value
