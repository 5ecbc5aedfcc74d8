"""Hypothesis strategies for values that are sent to processes or stored in files and databases."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from hypothesis import strategies as st

from trials.hardware_section import HardwareSection
from trials.job import (
    DataSection,
    EvaluationSection,
    Job,
    LearningRatesSection,
    ModelSection,
    SearchSection,
    Source,
    TrainingSection,
)
from trials.outcome import (
    Completed,
    Crash,
    Failed,
    Measurement,
    Outcome,
    OutOfMemory,
    Rejected,
    StageMeasurement,
    Timeout,
)
from trials.plan import Layout, Levelled, Packed, Packing, Padded, Plan
from trials.stage import Recomputed, Stage
from trials.units import size_setting, time_setting
from trials.workload import DataProfile, Hardware, ModelShape, Software, Workload

counts = st.integers(min_value=0, max_value=2**40)
positive = st.integers(min_value=1, max_value=2**40)
seconds = st.floats(min_value=1e-6, max_value=1e6)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    if draw(st.booleans()):
        return Padded(samples=draw(positive))
    qv, qt = draw(st.integers(0, 2**31 - 1)), draw(st.integers(1, 2**31 - 1))
    return Packed(qv=qv, qt=qt, qv_min=draw(st.integers(0, qv)), qt_min=draw(st.integers(0, qt)))


def _stage(draw: st.DrawFn, vision: int, language: int) -> Stage:
    return Stage(
        vision=vision,
        language=language,
        recompute_vision=draw(st.integers(0, vision)),
        recompute_language=draw(st.integers(0, language)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Valid plans: vision stages, at most one stage of both kinds, language stages."""
    layers = st.integers(1, 8)
    vision = draw(st.lists(layers.map(lambda count: (count, 0)), max_size=2))
    language = draw(st.lists(layers.map(lambda count: (0, count)), max_size=2))
    both = [(draw(layers), draw(layers))] if draw(st.booleans()) or not vision + language else []
    stages = tuple(_stage(draw, *split) for split in (*vision, *both, *language))
    degrees: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3) if len(stages) == 1 else (0, 1)
    layout = Layout(pipeline=len(stages), data=draw(st.integers(1, 8)), zero=draw(st.sampled_from(degrees)))
    groups = [each for each in range(1, layout.data) if layout.data % each == 0 and layout.zero < 2] or [1]
    layout = replace(layout, reduce_within=draw(st.sampled_from(groups)))
    layout = replace(layout, bucket_bytes=draw(st.sampled_from((0, 1 << 20))) if layout.can_overlap else 0)
    packing = draw(packings())
    if isinstance(packing, Packed) and not draw(st.integers(0, 3)):
        further = replace(packing, qt=min(packing.qt + draw(st.integers(1, 99)), 2**31 - 1))
        if further != packing:
            counts = [(stage.vision, stage.language) for stage in stages]
            drawn = [[draw(st.integers(0, count)) for count in of_stage] for of_stage in counts]
            again = [Recomputed(vision=vision, language=language) for vision, language in drawn]
            stages = tuple(replace(one, further_levels=(other,)) for one, other in zip(stages, again, strict=True))
            levels = Levelled(levels=(packing, further), whole_steps=draw(st.booleans()))
            return Plan(packing=levels, layout=layout, stages=stages)
    if isinstance(packing, Packed):
        divisors = [degree for degree in range(1, layout.data + 1) if layout.data % degree == 0]
        packing = replace(packing, sequence=draw(st.sampled_from(divisors)))
    return Plan(packing=packing, layout=layout, stages=stages)


_stage_measurements = st.builds(
    StageMeasurement,
    stage=counts,
    data_rank=counts,
    load_seconds=seconds,
    forward_seconds=seconds,
    backward_seconds=seconds,
    optimizer_seconds=seconds,
    idle_seconds=seconds,
    peak_bytes=counts,
    static_bytes=counts,
    tensor_rank=counts,
)
measurements = st.builds(
    Measurement,
    steps=st.lists(counts, max_size=3).map(tuple),
    step_seconds=st.lists(seconds, min_size=1, max_size=3).map(tuple),
    samples=counts,
    text_tokens=counts,
    vision_units=counts,
    losses=st.lists(seconds, max_size=3).map(tuple),
    stages=st.lists(_stage_measurements, min_size=1, max_size=3).map(tuple),
)
_causes = st.one_of(
    st.builds(OutOfMemory, stage=counts, rank=counts, needed_bytes=counts, limit_bytes=counts),
    st.builds(Crash, rank=counts, detail=texts),
    st.builds(Timeout, seconds=seconds),
)
outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(Completed, measurement=measurements),
    st.builds(Rejected, reason=texts),
    st.builds(Failed, cause=_causes),
)

hardware = st.builds(
    Hardware,
    accelerator=st.sampled_from(["cpu", "cuda"]),
    device_name=texts,
    devices=positive,
    device_memory_bytes=positive,
    compute_capability=st.none() | st.just("9.0"),
    driver=st.none() | texts,
    cpu_name=texts,
    cpu_cores=positive,
    ram_bytes=positive,
)
workloads = st.builds(
    Workload,
    model=st.builds(
        ModelShape,
        name=texts,
        family=texts,
        dtype=texts,
        vision_layers=positive,
        language_layers=positive,
        parameters=positive,
        unit_flops=seconds,
        token_flops=seconds,
        square_flops=seconds,
        config_digest=texts,
        target_flops=seconds,
    ),
    data=st.builds(
        DataProfile,
        samples=positive,
        text_only_samples=counts,
        vision_units=counts,
        text_tokens=counts,
        longest_text_tokens=counts,
        most_vision_units=counts,
        histogram=st.lists(st.tuples(counts, counts, positive), max_size=3).map(tuple),
        lengths_digest=texts,
        target_tokens=st.none() | counts,
    ),
    hardware=hardware,
    software=st.builds(Software, python=texts, torch=texts, deepspeed=texts, transformers=texts),
    oversize=texts,
    global_batch_samples=positive,
    memory_limit_bytes=positive,
)

_paths = st.from_regex(r"[a-z][a-z0-9._ /-]{0,20}", fullmatch=True).map(Path)


def _with_limit(data: DataSection) -> st.SearchStrategy[DataSection]:
    limits = st.none() | positive if data.oversize == "truncate" else st.none()
    return limits.map(lambda limit: data.model_copy(update={"max_tokens": limit}))


jobs = st.builds(
    Job,
    model=st.builds(
        ModelSection,
        path=texts.filter(bool),
        weights=st.sampled_from(["random", "pretrained"]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        trust_remote_code=st.booleans(),
    ),
    data=st.builds(
        DataSection,
        sources=st.lists(
            st.builds(
                Source,
                path=_paths,
                images=st.none() | _paths,
                format=texts,
                repeat=st.floats(0, 1000, exclude_min=True),
            ),
            min_size=1,
            max_size=3,
        ).map(tuple),
        on_error=st.sampled_from(["skip", "fail"]),
        oversize=st.sampled_from(["own-pack", "truncate", "skip", "fail"]),
        workers=st.integers(0, 64),
    ).flatmap(_with_limit),
    evaluation=st.builds(
        EvaluationSection,
        samples=st.floats(0, 1, exclude_min=True, exclude_max=True) | positive,
        every=st.none() | positive,
        seed=st.integers(0, 9),
    ),
    hardware=st.builds(
        HardwareSection, devices=st.none() | positive, memory_limit=st.none() | positive.map(size_setting)
    ),
    training=st.builds(
        TrainingSection,
        global_batch_samples=positive,
        learning_rate=seconds,
        learning_rates=st.builds(LearningRatesSection, vision=st.none() | seconds, projector=st.none() | seconds),
        schedule=st.sampled_from(["constant", "linear", "cosine"]),
        warmup=st.floats(0, 1, exclude_max=True) | positive.map(float),
        weight_decay=st.floats(0, 1),
        betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
        clip_norm=st.none() | seconds,
        freeze=st.sampled_from([(), ("language",)]),
        epochs=positive,
        seed=st.integers(0, 2**31 - 1),
        output=_paths,
        checkpoint_every=st.none() | positive,
    ),
    search=st.builds(
        SearchSection,
        trials=positive,
        time_limit=seconds.map(time_setting),
        sampler=texts,
        warmup_steps=counts,
        timed_steps=positive,
        trial_timeout=seconds.map(time_setting),
        workers=st.sampled_from(["warm", "fresh"]),
    ),
    database=st.none() | texts,
)
