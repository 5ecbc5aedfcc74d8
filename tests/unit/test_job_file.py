from pathlib import Path

import pytest

from autotune.errors import JobError
from autotune.job_file import load_job

MINIMAL = """\
model:
  path: some/model
data:
  sources:
    - path: train.jsonl
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def refusal(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(JobError) as caught:
        load_job(path)
    return str(caught.value)


def test_a_job_needs_a_model_and_data_only(job_file: Path) -> None:
    job_file.write_text(MINIMAL)
    job = load_job(job_file)
    assert job.search.trials == 24
    assert job.hardware.devices is None


def test_quantities_and_exponents_are_read_as_written(job_file: Path) -> None:
    job_file.write_text(
        MINIMAL + "hardware: {memory_limit: 400MiB}\nsearch: {time_limit: 10min}\ntraining: {learning_rate: 1e-5}\n"
    )
    job = load_job(job_file)
    assert job.hardware.memory_limit == 400 << 20
    assert job.search.time_limit == 600
    assert job.training.learning_rate == 1e-5


def test_relative_paths_start_at_the_job_file(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "some" / "model").mkdir(parents=True)
    job_file.write_text(MINIMAL + "      images: pictures\ntraining: {output: out}\n")
    job = load_job(job_file)
    source = job.data.sources[0]
    assert (source.path, source.images) == (tmp_path / "train.jsonl", tmp_path / "pictures")
    assert job.training.output == tmp_path / "out"
    assert job.model.path == str(tmp_path / "some" / "model")


def test_a_relative_job_file_gives_absolute_paths(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_file.write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    assert load_job(Path("job.yaml")).data.sources[0].path == tmp_path / "train.jsonl"


def test_absolute_and_home_paths_stay_where_they_are(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    job_file.write_text(MINIMAL.replace("train.jsonl", "/data/train.jsonl") + "training: {output: ~/out}\n")
    job = load_job(job_file)
    assert job.data.sources[0].path == Path("/data/train.jsonl")
    assert job.training.output == Path("/home/ada/out")


@pytest.mark.parametrize("path", ["org/model", "m" * 5000])
def test_a_model_without_a_folder_is_a_hub_id(job_file: Path, path: str) -> None:
    job_file.write_text(MINIMAL.replace("some/model", path))
    assert load_job(job_file).model.path == path


def test_every_problem_is_listed_with_its_line(job_file: Path) -> None:
    text = MINIMAL + "hardware:\n  devices: two\n  memory_limit: 4 parsecs\nserch: {}\n"
    assert refusal(job_file, text).splitlines() == [
        f"{job_file}, line 7: hardware.devices: must be a whole number, not 'two'",
        f"{job_file}, line 8: hardware.memory_limit: '4 parsecs' is not a size such as 400MiB or 1.5GB; "
        "units are B, KB, MB, GB, TB, KiB, MiB, GiB, TiB",
        f"{job_file}, line 9: serch: unknown key; did you mean search? "
        "known here: model, data, evaluation, hardware, training, search, database",
    ]


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            "hardware: {device: 2}",
            "hardware.device: unknown key; did you mean devices? known here: devices, memory_limit",
        ),
        ("epochs: 2", "epochs: unknown key; did you mean training.epochs?"),
        (
            "  max_tokens: 9\n  oversize: skip",
            "data.max_tokens: only means something with `oversize: truncate`; set that, or remove max_tokens",
        ),
        ("xyz: 2", "xyz: unknown key; known here: model, data"),
        ("hardware: {devices: true}", "hardware.devices: must be a whole number, not true"),
        ("hardware: {devices: 2.5}", "hardware.devices: must be a whole number, not 2.5"),
        ("hardware: {devices: '2'}", "hardware.devices: must be a whole number, not '2'"),
        ("hardware: {devices: 0}", "hardware.devices: must be greater than 0, not 0"),
        ("hardware: {memory_limit: 0}", "hardware.memory_limit: must be greater than 0, not 0"),
        ("hardware: 2", "hardware: must be a section with the keys devices, memory_limit, launcher, "),
        ("hardware:", "hardware: must be a section with the keys devices, memory_limit, launcher, "),
        ("training: {keep_checkpoints: 0}", "training.keep_checkpoints: must be greater than 0, not 0"),
        ("training: {learning_rate: .inf}", "training.learning_rate: must be a number, not '.inf'"),
        ("training: {learning_rate: [1]}", "training.learning_rate: must be a number, not a list"),
        ("training: {weight_decay: -0.1}", "training.weight_decay: must be greater than or equal to 0, not -0.1"),
        ("training: {weight_decay: .nan}", "training.weight_decay: must be a number, not '.nan'"),
        ("training: {betas: [0.9, 1]}", "training.betas[1]: must be less than 1, not 1"),
        ("training: {betas: [-0.1, 0.9]}", "training.betas[0]: must be greater than or equal to 0, not -0.1"),
        ("training: {betas: [0.9]}", "training.betas[1]: missing; add this entry to the list"),
        ("training: {betas: [0.9, 0.9, 0.9]}", "training.betas: must be a list of 2 entries at most, not a list"),
        ("training: {compile: auto}", "training.compile: must be true or false, not 'auto'"),
        ("training: {compile: 1}", "training.compile: must be true or false, not 1"),
        ("training: {clip_norm: 0}", "training.clip_norm: must be greater than 0, not 0"),
        (
            "training: {loss_weighting: sum}",
            "training.loss_weighting: must be 'token', 'sample' or 'square', not 'sum'",
        ),
        ("training: {schedule: step}", "training.schedule: must be 'constant', 'linear' or 'cosine', not 'step'"),
        ("training: {warmup: -1}", "training.warmup: must be greater than or equal to 0, not -1"),
        (
            "training: {warmup: 1.5}",
            "training.warmup: must be a share below 1 or a whole number of steps, not 1.5; round it",
        ),
        (
            "training: {warmup: 11, max_steps: 10}",
            "training.warmup: 11 steps are more than training.max_steps: 10; lower it, or raise max_steps",
        ),
        (
            "training: {curriculum: {steps: 5}}",
            "training.curriculum: has no max_tokens; add it, or remove the section",
        ),
        (
            "training: {curriculum: {max_tokens: 5}}",
            "training.curriculum: has no steps; add it, or remove the section",
        ),
        (
            "training: {curriculum: {steps: 0, max_tokens: 5}}",
            "training.curriculum.steps: must be greater than 0, not 0",
        ),
        (
            "training: {curriculum: {steps: 5, longest: 5}}",
            "training.curriculum.longest: unknown key; known here: steps, max_tokens",
        ),
        (
            "training: {curriculum: {steps: 11, max_tokens: 5}, max_steps: 10}",
            "training.curriculum: 11 steps are more than training.max_steps: 10; lower `steps`, or raise max_steps",
        ),
        ("training: {max_steps: 0}", "training.max_steps: must be greater than 0, not 0"),
        (
            "training: {learning_rates: {tower: 1e-6}}",
            "training.learning_rates.tower: unknown key; known here: vision, projector, language",
        ),
        (
            "training: {freeze: [tower]}",
            "training.freeze[0]: must be 'vision', 'projector' or 'language', not 'tower'",
        ),
        ("training: {freeze: [vision, vision]}", "training.freeze: names a part twice: vision, vision; name it once"),
        (
            "training: {freeze: [language, vision, projector]}",
            "training.freeze: freezes every part, so nothing would be trained; leave one out",
        ),
        (
            "training: {freeze: [vision], learning_rates: {vision: 1e-6}}",
            "training.freeze: freezes vision, which has a learning rate of 1e-06; remove one of the two",
        ),
        (
            "training: {lora: {r: 8}}",
            "training.lora.r: unknown key; known here: rank, alpha, parts, targets, train_projector, dropout",
        ),
        (
            "training: {lora: {alpha: 8}}",
            "training.lora: has no rank; give one, such as `rank: 8`, or remove the section",
        ),
        ("training: {lora: {rank: 0}}", "training.lora.rank: must be greater than 0, not 0"),
        (
            "training: {lora: {dropout: 0.05}}",
            "training.lora.dropout: must be 0, not 0.05: dropout masks would depend on the plan",
        ),
        (
            "training: {lora: {parts: [projector], train_projector: true}}",
            "training.lora.train_projector: trains the weights of the projector, which has adapters as well",
        ),
        (
            "training: {lora: {rank: 8}, freeze: [vision]}",
            "training.lora: freezes the model's own weights already; remove training.freeze",
        ),
        (
            "training: {lora: {rank: 8}, learning_rates: {vision: 1e-5}}",
            "training.lora: freezes vision, which has a learning rate of 1e-05; remove that",
        ),
        ("training: {learning_rates: {vision: 0}}", "training.learning_rates.vision: must be greater than 0, not 0"),
        ("training: {output: 7}", "training.output: must be a text; put quotes around it, not 7"),
        ("search: {sampler: {}}", "search.sampler: must be a text; put quotes around it, not a section"),
        ("search: {time_limit: 10}\nsearch: {}", "line 7: search: given twice, first on line 6; keep one"),
        ("search: {trials: 1, trials: 2}", "search.trials: given twice, first on line 6; keep one"),
        ("training: &t {}\nsearch: *t", "search: repeats this value by an alias"),
        ("[a]: 1", "line 6: the file: a key must be a single word"),
        ("<<: {}", "<<: unknown key"),
        ('training: {output: "a\\0b"}', "line 6: training.output: holds a null character (\\0); remove it"),
        ("database: !!python/object/apply:os.getcwd []", "database: the tag 'tag:yaml.org,2002:python/object/apply"),
        (
            "search: {space: {split: [12, 8], recompute: [[1]]}}",
            "search.space.recompute[0][1]: missing; add this entry",
        ),
        ("search: {space: {recompute: [[1, 2, 3]]}}", "search.space.recompute[0]: must be a list of 2 entries at most"),
        ("search: {space: {recompute: [[1, 2], [a, 1]]}}", "search.space.recompute[1][0]: must be a whole number"),
        ("search: {space: {recompute: some}}", "search.space.recompute: must be 'fit', 'all' or 'none', not 'some'"),
        ("database: !!binary aGk=", "database: the tag 'tag:yaml.org,2002:binary' is refused"),
        ('database: "\\ud800"', "half of a surrogate pair"),
    ],
)
def test_a_mistake_is_refused_with_its_key_and_the_remedy(job_file: Path, added: str, message: str) -> None:
    assert message in refusal(job_file, MINIMAL + added + "\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the file: must be a section with the keys model, data"),
        ("- a", "line 1: the file: must be a section with the keys model, data"),
        ("model: {}", "line 1: model.path: missing; add it (Local folder, relative to the job file, or hub id.)"),
        ("model: {path: a}", "line 1: data: missing; add it"),
        (
            "model: {path: a}\ndata: {sources: []}",
            "line 2: data.sources: must be a list with at least one entry, not a list",
        ),
        (
            "data: {sources: [{path: a, image: b}]}",
            "data.sources[0].image: unknown key; did you mean images? known here: path",
        ),
        ("data:\n  sources: x.jsonl", "data.sources: must be a list, with a dash before each entry, not 'x.jsonl'"),
        ("data:\n  sources:\n    - path: a\n      repeat: 0", "line 4: data.sources[0].repeat: must be greater than 0"),
        ("model: {weights: both}", "model.weights: must be 'random' or 'pretrained', not 'both'"),
        ("model:\n\tpath: a", "that cannot start any token; YAML is indented by spaces alone: replace the tabs"),
        ("model: [", "check indentation, colons, brackets and quotes there and in the line before"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: *b", "line 1: found undefined alias 'b'"),
        ("[" * 5000, "line 1: lists or sections are nested too deeply"),
        ("a: 1\nb: " + "[" * 101 + "]" * 101, "line 2: lists or sections are nested too deeply"),
        ("a: " + "{b: " * 101 + "}" * 101, "line 1: lists or sections are nested too deeply"),
        ("- " * 5000, "line 1: lists or sections are nested too deeply"),
    ],
)
def test_a_file_that_is_no_job_is_refused_with_its_line(job_file: Path, text: str, message: str) -> None:
    assert message in refusal(job_file, text)


@pytest.mark.parametrize(
    "added",
    [
        "database: [postgresql://ada:secret@host/db]",
        "databse: postgresql://ada:secret@host/db",
        "hardware: {devices: postgresql://ada:secret@host/db}",
        "training: postgresql://ada:secret@host/db",
    ],
)
def test_a_password_is_never_repeated(job_file: Path, added: str) -> None:
    assert "secret" not in refusal(job_file, MINIMAL + added)


def test_the_configuration_of_another_trainer_is_named_as_one(job_file: Path) -> None:
    job_file.write_text("model_name_or_path: org/name\nstage: sft\n")
    with pytest.raises(JobError, match=rf"is a section of a job .*; `autotune init --from {job_file}` writes a job"):
        load_job(job_file)


def test_a_long_value_is_shortened(job_file: Path) -> None:
    assert len(refusal(job_file, MINIMAL + f"hardware: {{devices: {'x' * 9999}}}")) < len(str(job_file)) + 200


def test_a_missing_file_a_folder_and_a_dataset_have_messages_of_their_own(tmp_path: Path, job_file: Path) -> None:
    with pytest.raises(JobError, match="no such file"):
        load_job(tmp_path / "other.yaml")
    with pytest.raises(JobError, match="is a folder"):
        load_job(tmp_path)
    with pytest.raises(JobError, match="cannot be read: embedded null byte"):
        load_job(Path("job\0.yaml"))
    assert "larger than 256 KiB; is it a dataset" in refusal(job_file, "#" * (1 << 18) + "\n")


def test_bytes_that_are_no_text_are_refused(job_file: Path) -> None:
    job_file.write_bytes(b"model: {}\ndata: \xff\n")
    with pytest.raises(JobError, match=r"line 2: not a text file in UTF-8"):
        load_job(job_file)


def test_plain_words_keep_their_spelling(job_file: Path) -> None:
    job_file.write_text(MINIMAL.replace("some/model", "no") + "database: 12:30\n")
    job = load_job(job_file)
    assert (job.model.path, job.database) == ("no", "12:30")


# --- values of the command line ---


def test_changes_replace_values_of_the_file_and_add_some(job_file: Path, tmp_path: Path) -> None:
    job_file.write_text(MINIMAL + "training: {epochs: 3}\n")
    changes = (
        "training.epochs=2",
        "training.learning_rate=1e-4",
        "hardware.memory_limit=400MiB",
        "data.sources[0].repeat=0.5",
        "search.space.layouts=[p2-d1-z0, p1-d2-z1]",
        "training.output=run=2",
    )
    job = load_job(job_file, changes)
    assert (job.training.epochs, job.training.learning_rate) == (2, 1e-4)
    assert job.hardware.memory_limit == 400 << 20
    assert job.data.sources[0].repeat == 0.5
    assert job.search.space.layouts == ("p2-d1-z0", "p1-d2-z1")
    assert job.training.output == tmp_path / "run=2"


def test_the_last_change_of_a_key_counts_and_an_empty_value_removes_one(job_file: Path) -> None:
    job_file.write_text(MINIMAL + "training: {max_steps: 7}\n")
    assert load_job(job_file, ("training.epochs=2", "training.epochs=5")).training.epochs == 5
    assert load_job(job_file, ("training.max_steps=",)).training.max_steps is None


def test_changes_complete_a_file_that_lacks_something(job_file: Path) -> None:
    job_file.write_text("")
    job = load_job(job_file, ("model.path=org/model", "data.sources=[{path: train.jsonl}]"))
    assert job.model.path == "org/model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.epochs=many", "--set training.epochs: must be a whole number, not 'many'"),
        ("training.epoch=2", "--set training.epoch: unknown key; did you mean epochs?"),
        ("training={epoch: 2}", "--set training.epoch: unknown key"),
        ("epochs=2", "--set epochs: unknown key; did you mean training.epochs?"),
        ("training.epochs", "--set 'training.epochs': give KEY=VALUE"),
        ("=2", "--set '=2': give KEY=VALUE"),
        ("training..epochs=2", "--set 'training..epochs=2': give KEY=VALUE"),
        ("data.sources[3].repeat=2", "--set data.sources[3].repeat: data.sources has 1 entries, counted from 0"),
        ("model.path.x=2", "--set model.path.x: model.path is not a section, so it has no key 'x'"),
        ("training.output=[a", "--set training.output: the value is not valid YAML"),
        ("training={a: 1, a: 2}", "--set training: a: given twice"),
        (
            "database=[postgresql://ada:secret@host/x]",
            "--set database: must be a text; put quotes around it, not a list",
        ),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(job_file: Path, change: str, message: str) -> None:
    job_file.write_text(MINIMAL)
    with pytest.raises(JobError) as caught:
        load_job(job_file, (change,))
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)


def test_problems_of_the_file_and_of_changes_are_listed_together(job_file: Path) -> None:
    job_file.write_text(MINIMAL + "training: {epochs: x}\n")
    with pytest.raises(JobError) as caught:
        load_job(job_file, ("training.seed=-1", "search.trials=0"))
    assert {line.partition(":")[0] for line in str(caught.value).splitlines()} == {
        "--set search.trials",
        "--set training.seed",
        f"{job_file}, line 6",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{samples: 2.5}",
            "must be a share below 1 or a whole number of samples, not 2.5; round it",
        ),
        ("{every: 5}", "evaluation: has nothing to evaluate on; add `samples`, or `sources`, or remove the section"),
        ("{samples: 5, sources: [{path: a}]}", "evaluation: has both `samples` and `sources`; keep one"),
        ("{sources: [{pth: a}]}", "evaluation.sources[0].pth: unknown key; did you mean path?"),
        ("{sources: [{}]}", "evaluation.sources[0].path: missing; add it (Annotation file, relative to the job file.)"),
    ],
)
def test_an_evaluation_that_makes_no_sense_is_refused(job_file: Path, text: str, message: str) -> None:
    assert message in refusal(job_file, f"{MINIMAL}evaluation: {text}\n")


def test_files_to_evaluate_on_are_relative_to_the_job_file(job_file: Path, tmp_path: Path) -> None:
    job_file.write_text(f"{MINIMAL}evaluation: {{sources: [{{path: held-out.jsonl}}]}}\n")
    assert [source.path for source in load_job(job_file).sources] == [
        tmp_path / "train.jsonl",
        tmp_path / "held-out.jsonl",
    ]
