"""`autotune export` compares the tokens of samples with those that the trainer counts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.exporting.same_tokens import Room
from tests.programs.users import JobFile, document, refusal
from tests.values.forecast import IN_BFLOAT16
from tests.values.parameters import parameters
from tests.values.training import plan_of
from trials.plan import Padded, Plan

pytestmark = pytest.mark.usefixtures("home")

PADDED = plan_of("12+8", data=2, packing=Padded(samples=2))
# Signatures are those of ms-swift 4.6. Tokens are those of the model's own processor, and some more.
TEMPLATE = """
import os
from pathlib import Path

from trials.data.records.sample import Sample, Turn

MORE, REFUSED = int(os.environ["MORE"]), os.environ.get("REFUSED", "never")


class Template:
    def __init__(self, processor):
        self.processor = processor

    def set_mode(self, mode):
        assert mode == "train"

    def encode(self, inputs, return_template_inputs=False, return_length=False):
        turns = tuple(Turn(role=each["role"], text=each["content"]) for each in inputs["messages"])
        images = tuple(map(Path, inputs.get("images", ())))
        assert all(image.is_absolute() for image in images)
        if any(REFUSED in turn.text for turn in turns):
            raise ValueError("no such thing")
        sample = Sample(turns=turns, images=images, image_sizes=(None,) * len(images))
        return {"lengths": [len(self.processor.token_ids(sample)) + MORE * len(images)]}


def get_template(processor, default_system=None, max_length=None, *, template_type=None, truncation_strategy="raise",
                 max_pixels=None):
    assert max_length is None
    return Template(processor)
"""
MODEL = """
from trials.model.plain.plain_inputs import PlainInputs
from trials.model.skeleton import load_config


def get_processor(model_id_or_path, *, model_type=None, **kwargs):
    return PlainInputs(model_id_or_path, load_config(model_id_or_path), trust_remote_code=False)
"""
ARGUMENTS = """
from dataclasses import dataclass


@dataclass
class TemplateArguments:
    template: str | None = None
    system: str | None = None
    max_length: int | None = None
    truncation_strategy: str | None = None
    max_pixels: int | None = None

    def get_template_kwargs(self):
        return {
            "template_type": self.template, "default_system": self.system, "max_length": self.max_length,
            "truncation_strategy": "raise", "max_pixels": self.max_pixels,
        }
"""


@pytest.fixture
def swift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the place of ms-swift, which counts MORE tokens for each image than the model's own processor."""
    folder = tmp_path / "packages"
    files = {
        "swift/template/__init__.py": TEMPLATE,
        "swift/model/__init__.py": MODEL,
        "swift/arguments/base_args/template_args.py": ARGUMENTS,
        "ms_swift-4.6.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: ms-swift\nVersion: 4.6.0\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{root}")
    monkeypatch.setenv("MORE", "0")
    return folder


@pytest.fixture
def arguments(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> Callable[..., list[str]]:
    """The arguments of an export to a new folder."""

    def made(trainer: str, plan: Plan, *options: str | Path) -> list[str]:
        given = (job.path, "--to", trainer, "--device-profile", profile, "--plan", plan_file(plan))
        return ["export", *map(str, (*given, "--out", tmp_path / "new", *options))]

    return made


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(
    "trainer",
    parameters({name: name for name in ("ms-swift", "llama-factory", "internvl")}, short=("llama-factory",)),
)
def test_the_model_s_own_processor_counts_where_a_trainer_is_not_installed(
    arguments: Callable[..., list[str]], trainer: str
) -> None:
    same, warned, *_ = document(*arguments(trainer, IN_BFLOAT16))["notes"]
    assert same.startswith("the model's own processor counts the same tokens in 32 samples; ")
    assert "did not count itself" in warned
    assert warned.endswith("may count otherwise")


@pytest.mark.usefixtures("in_bfloat16")
def test_a_trainer_counts_in_its_own_environment(swift: Path, arguments: Callable[..., list[str]]) -> None:
    found = document(*arguments("ms-swift", IN_BFLOAT16, "--trainer-python", sys.executable))["notes"]
    assert found[0].startswith("ms-swift 4.6.0 counts the same tokens in 32 samples; packs are rebuilt with -")
    assert not any("did not count itself" in note for note in found)


def test_packs_without_room_are_told_in_words() -> None:
    assert str(Room(fewer=0, more=0, what="packs are rebuilt")) == "packs are rebuilt only with the same tokens in each"
    assert str(Room(fewer=-2, more=0, what="packs are rebuilt")).endswith("with -2 to +0 tokens more in each")


@pytest.mark.long
def test_a_few_tokens_more_fit(
    swift: Path, arguments: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORE", "-1")
    plan = ("ms-swift", PADDED, "--trainer-python", sys.executable)
    first, *_ = document(*arguments(*plan))["notes"]
    assert first.startswith("ms-swift 4.6.0 counts from -")
    assert " to +0 tokens more in 32 samples; micro-batches fit with -64 to +" in first


def test_a_trainer_that_counts_other_tokens_is_refused(
    swift: Path, arguments: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MORE", "100")
    code, message = refusal(*arguments("ms-swift", PADDED, "--trainer-python", sys.executable))
    assert code == 2
    assert "train.jsonl:" in message
    assert "ms-swift 4.6.0 counts " in message
    assert "differ, all with images, by +0 to +" in message
    assert "template, system, and ENV with MIN_PIXELS" in message
    assert not (tmp_path / "new").exists()


def test_a_sample_that_a_trainer_does_not_take_is_named(
    swift: Path, arguments: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSED", "")
    code, message = refusal(*arguments("ms-swift", PADDED, "--trainer-python", sys.executable))
    assert (code, "does not take the sample (ValueError: no such thing)" in message) == (2, True), message


def test_a_package_that_fails_is_said(
    swift: Path, arguments: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (swift / "swift" / "model" / "__init__.py").write_text("import no_such_package")
    code, message = refusal(*arguments("ms-swift", PADDED, "--trainer-python", sys.executable))
    assert (code, "No module named 'no_such_package'" in message) == (2, True), message
    code, message = refusal(*arguments("ms-swift", PADDED, "--trainer-python", tmp_path / "none"))
    assert (code, "No such file" in message) == (2, True), message
    monkeypatch.syspath_prepend(swift)
    _, warned, *_ = document(*arguments("ms-swift", PADDED))["notes"]
    assert "ms-swift fails here: ModuleNotFoundError: No module named 'no_such_package'" in warned
