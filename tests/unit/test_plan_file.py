import json
from pathlib import Path

import pytest

from autotune.errors import PredictError
from autotune.plan_file import is_plan_file, read_plan
from tests.values.storage import packed_plan
from trials import wire

DOCUMENT = wire.to_document(packed_plan())
STAGE = {"vision": 2, "language": 1}


@pytest.mark.parametrize("document", [DOCUMENT, {"plan": DOCUMENT, "epoch_seconds": 1.5}])
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_plan_is_read_alone_or_from_what_a_command_printed(tmp_path: Path, document: object, suffix: str) -> None:
    path = tmp_path / f"plan{suffix}"
    path.write_text(json.dumps(document, indent=2))
    assert is_plan_file(str(path))
    assert read_plan(path) == packed_plan()


def test_a_plan_can_be_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "packing: {kind: packed, qv: 9, qt: 4096, qv_min: 9, qt_min: 3968}\n"
        "layout: {pipeline: 2, data: 4, zero: 1}\n"
        "stages:\n- {vision: 2, language: 1, recompute_vision: 1}\n- {vision: 0, language: 3}\n"
    )
    assert read_plan(path) == packed_plan()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stages": [STAGE]}, "describes 1 stage but pipeline is 2"),
        ({"stages": [STAGE, {"vision": 0, "language": 0}]}, "a stage needs at least one layer"),
        (
            {"stages": [STAGE, {"vision": 0, "language": 3, "recompute_language": 4}]},
            "cannot recompute 4 language layers",
        ),
        ({"layout": {"pipeline": 0, "data": 4, "zero": 1}}, "degrees of at least 1"),
        ({"layers": 3}, "layers: Extra|Unexpected"),
        ({"packing": {"kind": "packed", "qv": float("nan")}}, "packing"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**DOCUMENT, **changes}))
    with pytest.raises(PredictError, match=reason) as raised:
        read_plan(path)
    assert str(raised.value).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "plan"),
        (b"[1, 2]", "plan"),
        (b"a: 1\na: 2", "line 2"),
        (b"\xff\xfe", "plan"),
        (b"x" * (1 << 20) + b"xx", "larger than 1 MiB"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(PredictError, match=reason):
        read_plan(path)


def test_a_missing_file_is_reported_and_an_id_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(PredictError, match=r"No such file.*give a file such as"):
        read_plan(tmp_path / "plan.yaml")
    assert not is_plan_file("5b3868bf")
