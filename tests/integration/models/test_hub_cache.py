"""A model that the client of the Hugging Face hub has downloaded is used by its id, without a network."""

import hashlib
import json
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.job_file import as_job
from autotune.model_shape import model_shape
from autotune.workload import prepare
from tests.programs.users import JobFile, refusal
from tests.values.saved_models import saved_model
from tests.values.training import job_of, plan_of, train
from trials.model.hub import folder_of, published_name
from trials.model.inputs.chat_template import template_file
from trials.model.inputs.processor import load_processor
from trials.model.skeleton import load_config
from trials.run.pool import WarmPool
from trials.tasks.training.checkpoint import add_processor

ID = "some-lab/Tiny-VLM-1B"
COMMIT = "9f1e5a3c" * 5


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a machine whose hub does not answer."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


@pytest.fixture
def saved(shallow: Path, tmp_path: Path) -> Path:
    saved_model(shallow, tmp_path / "saved")
    return tmp_path / "saved"


def download(model: Path, cache: Path) -> Path:
    """The cache's folder of a model, as the client lays it out: files named by their content, and links to them."""
    place = cache / f"models--{ID.replace('/', '--')}"
    snapshot = place / "snapshots" / COMMIT
    for folder in (snapshot, place / "blobs", place / "refs"):
        folder.mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    for file in model.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        (place / "blobs" / blob).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob))
    return snapshot


def test_a_cached_model_is_the_one_of_its_folder(saved: Path, cache: Path, shallow: Path, tmp_path: Path) -> None:
    snapshot = download(saved, cache)
    folder, hub = (
        as_job(job_of(shallow, tmp_path / "output", model={"path": path, "weights": "pretrained"})).model
        for path in (str(saved), ID)
    )
    assert hub.path == str(snapshot)
    assert model_shape(hub).name == "Tiny-VLM-1B"
    assert model_shape(hub).fingerprint == model_shape(folder).fingerprint
    assert published_name(hub.path) == ID


@pytest.mark.usefixtures("devices_in_use")
def test_the_commands_take_the_id_of_a_cached_model(
    saved: Path, cache: Path, shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(saved, cache)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.json").write_text(json.dumps([{"vit_num": 1, "token_num": 9}] * 16))
    for command in (
        f"init {ID} {shallow / 'data' / 'train.jsonl'} --devices 1",
        "doctor job.yaml --json",
        "pack job.yaml --data-parallel 2 --json",
        f"pack lengths.json --model {ID} --data-parallel 2 --json",
    ):
        answer = CliRunner().invoke(main, command.split())
        assert answer.exit_code == 0, answer.stderr
    assert f"path: {ID}" in (tmp_path / "job.yaml").read_text()
    assert "Tiny-VLM-1B" in answer.stdout


@pytest.mark.usefixtures("devices_in_use")
def test_that_the_hub_does_not_answer_is_said_once(
    saved: Path, cache: Path, job: JobFile, caplog: pytest.LogCaptureFixture
) -> None:
    (saved / "model.safetensors").unlink()
    snapshot = download(saved, cache)
    answer = CliRunner().invoke(main, ["doctor", job.spoil(model={"path": ID, "weights": "random"}), "--json"])
    assert answer.exit_code == 0, answer.stderr
    assert [record.getMessage() for record in caplog.records] == [
        f"http://127.0.0.1:9 does not answer, so model {ID} is as the cache has it, in {snapshot}"
    ]


@pytest.mark.long
@pytest.mark.ranks
def test_an_adapter_names_the_id_and_commit_of_the_cached_model_on_which_it_was_trained(
    saved: Path, cache: Path, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    snapshot = download(saved, cache)
    prepared = prepare(
        as_job(
            job_of(
                shallow,
                tmp_path / "output",
                model={"path": ID, "weights": "pretrained"},
                training={"lora": {"rank": 4}, "max_steps": 1},
            )
        ),
        tmp_path,
    )
    report = train(pool, prepared, plan_of("2+0", "2+2"))
    assert report.model is not None
    written = json.loads((report.model / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == (ID, snapshot.name)


def test_the_processor_of_a_model_that_is_read_by_its_id_is_written_whole(
    saved: Path, cache: Path, shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (saved / "model.safetensors").unlink()
    template = (saved / "chat_template.jinja").read_text()
    (saved / "chat_template.jinja").unlink()
    (saved / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    for name in ("generation_config.json", "video_preprocessor_config.json"):
        (saved / name).write_text('{"eos_token_id": [1, 2]}')
    download(saved, cache)
    model = as_job(job_of(shallow, tmp_path / "output", model={"path": ID, "weights": "random"})).model
    assert model.path == ID
    assert template_file(ID) == "chat_template.json"
    written = tmp_path / "written"
    add_processor(model, written)
    assert load_processor(str(written), load_config(ID), trust_remote_code=False).chat_template == template
    copied = {*saved.glob("*processor*"), saved / "generation_config.json", saved / "chat_template.json"}
    assert len(copied) > 3
    assert [path.name for path in copied if path.read_bytes() != (written / path.name).read_bytes()] == []


@pytest.mark.usefixtures("home")
def test_a_model_that_is_not_in_the_cache_is_refused_with_the_command_that_downloads_it(
    saved: Path, cache: Path, job: JobFile
) -> None:
    file = job.spoil(model={"path": ID, "weights": "pretrained"})
    code, message = refusal("doctor", file)
    assert code == 1
    assert "does not answer; correct model.path, or copy the model to this machine, as by `hf download" in message
    (saved / "model.safetensors").unlink()
    download(saved, cache)
    code, message = refusal("doctor", file)
    assert code == 1
    assert f"the weights of model {ID} are not on this machine as safetensors; run `hf download {ID}`" in message


@pytest.mark.parametrize("text", ["no/such", "a model?", "/nowhere/model", "../model", "a/b/c", "", "x" * 5000])
def test_what_is_not_in_the_cache_stays_as_it_is(text: str, cache: Path) -> None:
    assert (folder_of(text), published_name(text)) == (text, text)
