"""Whether a stored plan may still be used when the workload has changed."""

from dataclasses import fields, is_dataclass, replace

import pytest

from storage.validity import Verdict, validity
from tests.values.storage import WORKLOAD, changed

VALID = {"model.name", "data.lengths_digest"}
INVALID = {
    "model.family",
    "model.dtype",
    "model.vision_layers",
    "model.language_layers",
    "model.parameters",
    "model.unit_flops",
    "model.token_flops",
    "model.square_flops",
    "model.target_flops",
    "model.config_digest",
    "model.trained",
    "model.compiler",
    "hardware.accelerator",
    "hardware.device_name",
    "hardware.compute_capability",
}
REMEASURE = {
    "model.gradient_dtype",
    "data.samples",
    "data.text_only_samples",
    "data.vision_units",
    "data.text_tokens",
    "data.target_tokens",
    "data.longest_text_tokens",
    "data.most_vision_units",
    "data.histogram",
    "hardware.devices",
    "hardware.nodes",
    "hardware.link",
    "hardware.topology",
    "hardware.device_memory_bytes",
    "hardware.driver",
    "hardware.power_limit_watts",
    "hardware.cpu_name",
    "hardware.cpu_cores",
    "hardware.ram_bytes",
    "software.python",
    "software.torch",
    "software.deepspeed",
    "software.transformers",
    "oversize",
    "global_batch_samples",
    "memory_limit_bytes",
}


def all_fields(value: object, prefix: str = "") -> set[str]:
    if not is_dataclass(value):
        return {prefix.removesuffix(".")}
    return {name for f in fields(value) for name in all_fields(getattr(value, f.name), f"{prefix}{f.name}.")}


def test_every_field_of_a_workload_has_a_verdict_here() -> None:
    assert all_fields(WORKLOAD) == VALID | INVALID | REMEASURE


@pytest.mark.parametrize(
    ("field", "verdict"),
    [
        (field, verdict)
        for verdict, group in zip(Verdict, (VALID, REMEASURE, INVALID), strict=True)
        for field in sorted(group)
    ],
)
def test_a_change_of_one_field_has_its_verdict_and_is_named(field: str, verdict: Verdict) -> None:
    other = 77 if field == "data.samples" else "other"
    answer = validity(WORKLOAD, changed(field, other))
    assert answer.verdict is verdict
    (change,) = answer.changes
    assert (change.field, change.now, change.verdict) == (field, other, verdict)
    assert str(change).startswith({"memory_limit_bytes": "hardware.memory_limit"}.get(field, field))


def test_the_same_workload_is_valid_without_changes() -> None:
    assert validity(WORKLOAD, changed("model.name", WORKLOAD.model.name)) == validity(WORKLOAD, WORKLOAD)
    assert validity(WORKLOAD, WORKLOAD).verdict is Verdict.VALID
    assert validity(WORKLOAD, WORKLOAD).changes == ()


def test_the_worst_change_decides_and_all_are_listed() -> None:
    now = changed("hardware.driver", None, changed("model.name", "renamed", changed("model.family", "qwen2_vl")))
    answer = validity(WORKLOAD, now)
    assert answer.verdict is Verdict.INVALID
    assert [change.field for change in answer.changes] == ["model.name", "model.family", "hardware.driver"]
    assert str(answer.changes[-1]) == "hardware.driver was 570.86.15, now None"


def test_the_histogram_is_not_spelled_out() -> None:
    (change,) = validity(WORKLOAD, changed("data.histogram", ((0, 64, 1000),))).changes
    assert str(change) == "data.histogram changed"


def test_sizes_are_written_as_a_job_file_has_them() -> None:
    sizes = [160 << 20, 170 << 20, 33_567_891_456]
    first, second, third = (replace(WORKLOAD, memory_limit_bytes=size) for size in sizes)
    changes = [*validity(first, second).changes, *validity(second, third).changes]
    assert list(map(str, changes)) == [
        "hardware.memory_limit was 160MiB, now 170MiB",
        "hardware.memory_limit was 170MiB, now 32012.8 MiB",
    ]
