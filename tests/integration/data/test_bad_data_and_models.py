"""Unusable datasets and models are reported by file and line, or by name, before anything runs."""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from autotune import SampleDataset
from autotune.machine.devices import locked
from autotune.workload import prepare
from tests.programs.users import JobFile, databases, document, refusal
from tests.values.data import record, write_records
from tests.values.training import job_of, plan_of
from trials.data import measuring
from trials.errors import DataError, ModelError
from trials.model.skeleton import build_skeleton, load_config
from trials.tasks.request import Training
from trials.tasks.training.settings import Settings, training_settings

BAD_LINES = (b'{"id": 1, ', {"id": 2}, record("<image>What?", "A box.", image="gone.png"))

pytestmark = pytest.mark.usefixtures("home")


# --- the data ---


UNUSABLE_DATA: tuple[tuple[tuple[object, ...] | list[object] | None, dict[str, object], str], ...] = (
    (None, {}, "train.jsonl does not exist; correct its path"),
    ([], {}, "train.jsonl is empty; write the dataset again"),
    ([b"hello"], {}, "is in no format known here (its first record: the record is not JSON"),
    (
        BAD_LINES,
        {},
        "no sample of {path} can be used, of 3 records; the first fault is {path}:1: the record is not JSON",
    ),
    (BAD_LINES[2:], {}, "{path}:1: image {folder}/gone.png does not exist; correct the lines, or `images`"),
    (
        (*BAD_LINES, record("What?", "A box.")),
        {"on_error": "fail"},
        "{path}:1: the record is not JSON: Expecting",
    ),
    ((record("Hi?", "Ho."), BAD_LINES[1]), {"on_error": "fail"}, "{path}:2: `conversations` is missing"),
    (
        [{"vit_num": 1, "token_num": 70, "image_flags": 1}],
        {},
        "data.sources: {path} holds only lengths, so there is nothing to train on; give the annotation file",
    ),
)


def test_unusable_data_is_reported_with_file_and_line(job: JobFile, tmp_path: Path) -> None:
    for number, (lines, changes, message) in enumerate(UNUSABLE_DATA):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        path = folder / "train.jsonl"
        if lines is not None:
            write_records(path, *lines)
        code, reported = refusal("tune", job.spoil(data={"sources": [{"path": str(path)}], **changes}))
        assert code == 1
        assert message.format(path=path, folder=folder) in reported
        assert lines is not None or not databases(tmp_path)


def test_bad_lines_are_skipped_with_a_warning_and_a_small_dataset_is_warned_of(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (28, 28)).save(tmp_path / "here.png")
    shown = record("<image>What?", "A box.", image="here.png")
    path = write_records(tmp_path / "train.jsonl", shown, *BAD_LINES, record("Who?", "Ada."))
    job = job_of(example, tmp_path / "output", data={"sources": [{"path": str(path)}]})
    assert prepare(job, tmp_path).workload.data.samples == 2
    skipped, small = caplog.messages
    SampleDataset(job)
    assert caplog.messages == [skipped, small] * 2
    first, *named = skipped.splitlines()
    assert first == (
        "3 of 5 dataset lines are skipped; correct them, or `images` and `format` of their source, as by "
        "`--set data.sources.0.images=FOLDER` (0 is the first source):"
    )
    assert [line.split(": ")[0].strip() for line in named] == [f"{path}:{number}" for number in (2, 3, 4)]
    assert small.startswith("an epoch has 2 samples, fewer than training.global_batch_samples: 8")


@pytest.mark.parametrize(
    ("training", "named"),
    [({}, "vision and projector"), ({"freeze": ("vision",)}, "projector"), ({"weight_decay": 0.0}, None)],
)
def test_data_without_images_for_a_model_with_vision_are_warned_of(
    training: dict[str, Any], named: str | None, example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_records(tmp_path / "train.jsonl", *[record("Who?", "Ada.")] * 8)
    prepare(job_of(example, tmp_path / "output", data={"sources": [{"path": str(path)}]}, training=training), tmp_path)
    warned = f"no sample has an image, so the weights of {named} have no gradient, and weight decay alone changes them"
    assert [message.partition(";")[0] for message in caplog.messages] == ([warned] if named else [])


def test_a_search_on_text_alone_is_refused_where_every_image_is_lost(job: JobFile, tmp_path: Path) -> None:
    """Also where the lengths are known from the search before."""
    lines = (record("What?", "A box."), *BAD_LINES, record("<image>Where?", "Here.", image="lost.png"))
    path = write_records(tmp_path / "train.jsonl", *lines)
    lost = (
        "no image or video is left to train on: 2 of 2 records with some cannot be used, the first is "
        f"{path}:4: image {tmp_path / 'gone.png'} does not exist"
    )
    for _ in range(2):
        code, reported = refusal("tune", job.spoil(data__sources=[{"path": str(path)}]))
        assert (code, reported.partition("; ")[0]) == (1, lost)
    with locked(("cpu",)):  # so that no layers are tried, for which a process would import torch
        finding, untried = document("doctor", job.path)["findings"]
    assert finding["what"] == lost
    assert untried["what"].startswith("no convolution or attention was tried")
    assert "take these records out to train on text alone" in finding["remedy"]
    with pytest.raises(DataError, match=f"^{re.escape(lost)}; correct `images`"):
        SampleDataset(job.path)
    Image.new("RGB", (28, 28)).save(tmp_path / "lost.png")
    with locked(("cpu",)):
        finding, _ = document("doctor", job.path)["findings"]
    assert finding["what"].startswith("3 of 5 dataset lines cannot be used")


def test_the_data_of_a_second_command_is_known(job: JobFile, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # a search that is refused when the data has been read
        code, reported = refusal("run", job.spoil(search__sampler="nope"))
        assert (code, "'nope' is not one of the samplers" in reported) == (2, True)
        monkeypatch.setattr(measuring, "measure", None)
    assert {path.suffix for path in (home / "cache" / "autotune" / "lengths").iterdir()} == {".npz", ".tokens"}


UNUSABLE_EVALUATIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"samples": 48}, "evaluation.samples: 48 of the 48 samples of data.sources leave none to train on; lower it"),
    ({"sources": [{"path": "{folder}/gone.jsonl"}]}, "gone.jsonl does not exist; correct its path"),
    (
        {"sources": [{"path": "{folder}/lengths.jsonl"}]},
        "evaluation.sources: {folder}/lengths.jsonl holds only lengths",
    ),
    (
        {"sources": [{"path": "{folder}/lost.jsonl"}]},
        "no image or video is left to evaluate on: 1 of 1 record with some cannot be used, the first is "
        "{folder}/lost.jsonl:2: image {folder}/gone.png does not exist; correct `images` of the source, as by "
        "`--set evaluation.sources.0.images=FOLDER`",
    ),
)


def test_unusable_samples_to_evaluate_on_are_refused_before_anything_runs(job: JobFile, tmp_path: Path) -> None:
    write_records(tmp_path / "lengths.jsonl", {"vit_num": 1, "token_num": 70, "image_flags": 1})
    write_records(tmp_path / "lost.jsonl", record("Who?", "Ada."), BAD_LINES[2])
    for evaluation, message in UNUSABLE_EVALUATIONS:
        given = json.loads(json.dumps(evaluation).replace("{folder}", str(tmp_path)))
        code, reported = refusal("run", job.spoil(evaluation=given))
        assert code == 1
        assert message.format(folder=tmp_path) in reported
        assert not job.output.exists()


def test_samples_to_evaluate_on_that_are_trained_on_too_are_warned_of(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = {"path": str((example / "data" / "train.jsonl").resolve())}
    job = job_of(
        example,
        tmp_path / "output",
        data={"sources": [{**source, "sampling": "first:40"}]},
        evaluation={"sources": [{**source, "sampling": "end:10"}]},
    )
    prepared = prepare(job, tmp_path)
    assert prepared.workload.data.samples == 40
    assert prepared.held_out is not None
    assert len(prepared.held_out) == 10
    (warning,) = caplog.messages
    assert warning.startswith(
        f"2 of the 10 samples of evaluation.sources are also in data.sources, {source['path']}:39"
    )


def test_only_drawn_samples_to_evaluate_on_are_warned_of(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = {"path": str((example / "data" / "train.jsonl").resolve())}
    changes = {"evaluation": {"sources": [{**source, "sampling": "random:10"}]}}
    prepare(job_of(example, tmp_path / "output", **changes), tmp_path)
    assert caplog.messages[0].startswith("10 of the 10 samples of evaluation.sources are also in data.sources")


def test_held_out_samples_are_no_part_of_the_workload(example: Path, tmp_path: Path) -> None:
    whole = prepare(job_of(example, tmp_path / "output"), tmp_path)
    part = prepare(job_of(example, tmp_path / "output", evaluation={"samples": 0.25}), tmp_path)
    assert (whole.held_out_file, part.workload.data.samples) == (None, 36)
    assert whole.workload.data.lengths_digest != part.workload.data.lengths_digest
    assert part.held_out is not None
    assert part.held_out_file != part.index_file
    assert part.workload.data.text_tokens + part.held_out.text_tokens.sum() == whole.workload.data.text_tokens


def test_a_training_has_other_settings_with_other_held_out_samples(example: Path, tmp_path: Path) -> None:
    def settings(sampling: str, seed: int) -> Settings:
        source = {"path": str((example / "data" / "train.jsonl").resolve()), "sampling": sampling}
        job = job_of(example, tmp_path / "output", evaluation={"sources": [source], "seed": seed})
        prepared = prepare(job, tmp_path)
        return training_settings(prepared.request(plan_of("4+2"), Training(output=job.training.output)), prepared.index)

    last = settings("end:10", 0)
    assert settings("end:10", 1) == last  # in another order
    # A random half is drawn with the seed.
    others = [settings("end:8", 0), settings("random:10", 0), settings("random:10", 1)]
    assert len({each.evaluation_data for each in (last, *others)}) == 4
    assert all(replace(each, evaluation_data=last.evaluation_data) == last for each in others)


# --- the model ---


def set_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


UNUSABLE_MODELS: tuple[tuple[Callable[[Path], object], str], ...] = (
    (shutil.rmtree, "does not exist; give a local folder or a hub id such as org/name"),
    (
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json; save the model there with save_pretrained",
    ),
    (lambda folder: (folder / "config.json").write_text("{"), "is not a valid JSON file"),
    (lambda folder: (folder / "config.json").write_text("{}"), "Should have a `model_type` key in its config.json"),
    (lambda folder: set_config(folder, model_type="martian"), "has model type `martian` but Transformers does not"),
    (
        lambda folder: set_config(folder, model_type="bert"),
        "model type 'bert' is not supported: its is_decoder is false, as that of an encoder",
    ),
    (
        lambda folder: set_config(folder, text_config={"num_hidden_layers": "eight"}),
        "Field 'num_hidden_layers' expected int, got str (value: 'eight')",
    ),
    (
        lambda folder: set_config(folder, text_config={"model_type": "gpt2"}),
        "it has no norm and no rotary_emb next to",
    ),
    (
        lambda folder: set_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"}),
        r"model_type 'own' is not supported: its code comes with the model (auto_map) and can be of any structure",
    ),
    (
        lambda folder: set_config(folder, model_type="internvl_chat", auto_map={"AutoConfig": "own.Config"}),
        "publishes under names that end in -hf, such as OpenGVLab/InternVL3-1B-hf",
    ),
    (lambda folder: (folder / "tokenizer.json").unlink(), "the tokenizer of model"),
)


def test_an_unusable_model_is_reported_and_no_database_is_created(
    job: JobFile, example: Path, home: Path, tmp_path: Path
) -> None:
    for number, (spoil, message) in enumerate(UNUSABLE_MODELS):
        model = shutil.copytree(example / "model", tmp_path / f"{number}")
        spoil(model)
        code, reported = refusal("tune", job.spoil(model__path=str(model)))
        assert code == 1
        assert message in reported
        assert not databases(home)


def test_a_file_is_no_model(job: JobFile) -> None:
    with pytest.raises(ModelError, match=r"job.yaml is a file; give the folder that it is in"):
        load_config(str(job.path))


@pytest.mark.parametrize("path", ["nobody/no-such-model", "a model?"])
def test_a_hub_that_does_not_answer_fails_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"is not a folder next to the job file.*correct model.path"):
        load_config(path)
    assert time.monotonic() - start < 8


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model = build_skeleton(load_config(str(folder)), torch.float32).model
    return {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}


def save_index(folder: Path, document: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


UNUSABLE_WEIGHTS: tuple[tuple[Callable[[Path], object], str], ...] = (
    (
        lambda folder: None,
        "has no model.safetensors; save the weights there as safetensors, or set `model.weights: random`",
    ),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), "model.safetensors cannot be read ("),
    (lambda folder: save_index(folder, {}), "has no weight_map, so it is no index of weights"),
    (
        lambda folder: save_index(folder, {"weight_map": dict.fromkeys(weights_of(folder), "gone.safetensors")}),
        "gone.safetensors cannot be read (",
    ),
    (
        lambda folder: save_index(folder, {"weight_map": {"a": "../../other/x.safetensors"}}),
        "names '../../other/x.safetensors' for a, which is no safetensors file of its folder",
    ),
    (lambda folder: save_index(folder, {"weight_map": {"a": 5}}), "names 5 for a, which is no safetensors file"),
    (lambda folder: save_index(folder, []), "it holds a JSON list, not an object"),
    (
        lambda folder: os.mkfifo(folder / "model.safetensors"),
        "model.safetensors cannot be read (it is a named pipe, not a regular file)",
    ),
    (
        lambda folder: (folder / "model.safetensors").write_bytes((10**18).to_bytes(8, "little") + b"{}"),
        "model.safetensors cannot be read (",
    ),
    (
        lambda folder: save_file(dict(list(weights_of(folder).items())[2:]), folder / "model.safetensors"),
        "2 parameters are missing and 0 are unknown, for example",
    ),
    (
        lambda folder: save_file({**weights_of(folder), "x": torch.zeros(1)}, folder / "model.safetensors"),
        "0 parameters are missing and 1 are unknown, for example x; take the configuration that",
    ),
    (
        lambda folder: save_file(
            {**weights_of(folder), "lm_head.weight": torch.zeros(3)}, folder / "model.safetensors"
        ),
        "lm_head.weight has shape (3,) in the files but (",
    ),
)


def test_weights_that_do_not_fit_are_reported_before_a_rank_starts(job: JobFile, example: Path, tmp_path: Path) -> None:
    for number, (spoil, message) in enumerate(UNUSABLE_WEIGHTS):
        model = shutil.copytree(example / "model", tmp_path / f"{number}")
        spoil(model)
        code, reported = refusal("tune", job.spoil(model__path=str(model), model__weights="pretrained"))
        assert code == 1
        assert message in reported
