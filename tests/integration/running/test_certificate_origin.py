"""What a certificate rests on besides the job."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import PIL
import pytest

import trials
from autotune.certification import origin
from autotune.certification.origin import origin_digest
from tests.values.saved_models import saved_model
from tests.values.training import prepared_of


@pytest.fixture
def folder(shallow: Path, tmp_path: Path) -> Path:
    """A folder with weights and data that a test may change."""
    saved_model(shallow, tmp_path / "model")
    shutil.copytree(shallow / "data", tmp_path / "data")
    return tmp_path


def test_other_files_or_code_need_another_certificate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"path": str(folder / "model"), "weights": "pretrained"}

    def digest() -> str:
        return origin_digest(prepared_of(folder, folder / "work", model=model))

    def appended(name: str, text: bytes = b" ") -> Callable[[], object]:
        file = folder / name
        return lambda: file.write_bytes(file.read_bytes() + text)

    image = next((folder / "data").rglob("*.png"))
    weights = folder / "model" / "model.safetensors"
    code = shutil.copytree(Path(trials.__file__).parent, folder / "trials")
    monkeypatch.setattr(trials, "__path__", [str(code)])
    changes: dict[str, Callable[[], object]] = {
        "template": appended("model/chat_template.jinja"),
        "preprocessor": appended("model/preprocessor_config.json"),
        "weights": lambda: weights.write_bytes(weights.read_bytes()[:-1] + b"\1"),
        "texts": appended("data/train.jsonl", b"\n"),
        "an image": lambda: os.utime(image, ns=(0, 0)),
        "code": appended("trials/engine/base.py"),
        "Pillow": lambda: monkeypatch.setattr(PIL, "__version__", "1"),
        "a library": lambda: monkeypatch.setattr(origin, "version", lambda _: "1"),
    }
    found = [digest(), digest()]
    for change in changes.values():
        change()
        found.append(digest())
    assert found[0] == found[1]
    assert len(set(found)) == 1 + len(changes)
