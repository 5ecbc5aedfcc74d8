"""Layers that torch compiles: in trials, a profile and a training on real ranks, and what is refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors import safe_open

from autotune.cli import main
from autotune.dimensions.folds import unprofiled
from autotune.errors import PlanNotValid
from autotune.machine.devices import locked
from autotune.plan_check import check_plan
from autotune.search.execution.profiling import profile_layers
from storage.store import open_store
from tests.machines.traced import traced
from tests.programs.processes import children
from tests.programs.users import JobFile, refusal
from tests.tiny_models import text
from tests.values.parameters import parameters
from tests.values.training import PACKED, plan_of, prepared_of
from trials.channels.folder import FolderChannel, file_rendezvous
from trials.data.epoch import Step
from trials.engine.group import process_group
from trials.launchers.local import LocalLauncher
from trials.model.refusals.compiling import missing_tool
from trials.outcome import Crash
from trials.plan import Layout, Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial
from trials.tasks.session import Session, open_session
from trials.tasks.trial import run_trial

COMPILED: dict[str, Any] = {"compile": True}
SHORT = Trial(warmup_steps=(0,), timed_steps=(1, 2))
DATA = plan_of("0+4", data=2, zero=1)
needs_compiler = pytest.mark.skipif(
    missing_tool("cpu") is not None, reason=f"torch.compile lacks {missing_tool('cpu')}"
)
pytestmark = pytest.mark.timeout(1800)  # a slow machine compiles for many minutes


@pytest.fixture(scope="module")
def words(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for text alone, which has one kind of layers to compile, and conversations for it."""
    folder = tmp_path_factory.mktemp("words")
    text.make_kind(folder / "model", "llama")
    (folder / "data").mkdir()
    records = [json.loads(line) for line in (example / "data" / "train.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("image", None)
        record["conversations"][0]["value"] = record["conversations"][0]["value"].replace("<image>\n", "")
    (folder / "data" / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


@pytest.fixture
def compiling_pool(tmp_path: Path) -> Iterator[WarmPool]:
    with WarmPool(LocalLauncher(tmp_path / "ranks", 2, "cpu")) as pool:
        yield pool


def report_of(answer: object) -> TrialReport:
    assert isinstance(answer, Answers), answer
    report = answer.reports[0]
    assert isinstance(report, TrialReport)
    return report


def plain_and_compiled(
    model: Path, plan: Plan, pool: WarmPool, compiling_pool: WarmPool, folder: Path
) -> tuple[TrialReport, TrialReport]:
    """Return the reports of trials without and with compiled layers."""
    plain, compiled = prepared_of(model, folder), prepared_of(model, folder, training=COMPILED)
    answers = pool.ask(plain.request(plan, SHORT), 180), compiling_pool.ask(compiled.request(plan, SHORT), 900)
    return report_of(answers[0]), report_of(answers[1])


def kept_bytes(report: TrialReport) -> int:
    return report.stage.peak_bytes - report.stage.static_bytes


@needs_compiler
@pytest.mark.long
@pytest.mark.ranks
def test_compiled_layers_have_the_losses_of_plain_ones_keep_less_and_leave_no_process(
    words: Path, pool: WarmPool, compiling_pool: WarmPool, tmp_path: Path
) -> None:
    expected, found = plain_and_compiled(words, DATA, pool, compiling_pool, tmp_path)
    # A step that compiles is run again, and the losses of later ones would differ.
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert kept_bytes(found) < 0.9 * kept_bytes(expected)
    assert [children(pid) for pid in compiling_pool.pids] == [[], []]


PLANS = {
    "recomputed": plan_of("4+2r2,1", data=2, zero=1),
    "gradients in shards": plan_of("4+2r2,1", data=2, zero=2),
    "pipeline": plan_of("3+0r2,0", "1+2"),
    "shared packs": plan_of("4+2", data=2, packing=replace(PACKED, sequence=2)),
}


@needs_compiler
@pytest.mark.long
@pytest.mark.ranks
def test_both_kinds_of_layers_are_compiled_under_every_kind_of_plan(
    shallow: Path, pool: WarmPool, compiling_pool: WarmPool, tmp_path: Path
) -> None:
    for name, plan in PLANS.items():
        expected, found = plain_and_compiled(shallow, plan, pool, compiling_pool, tmp_path)
        assert found.losses == pytest.approx(expected.losses, rel=1e-5), name
        assert kept_bytes(found) < kept_bytes(expected), name


# --- trials ---


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it does itself
def test_a_step_that_compiles_layers_is_run_again_and_not_timed(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    ran: list[int] = []
    run = Session.step

    def noted(session: Session, batches: Any, step: Step) -> float:
        ran.append(step.samples)
        return run(session, batches, step)

    monkeypatch.setattr(Session, "step", noted)
    prepared = prepared_of(words, tmp_path, training=COMPILED)
    task = Trial(warmup_steps=(), timed_steps=(0, 1))
    request = prepared.request(plan_of("0+4"), task)
    with (
        traced("eager"),
        process_group(0, 0, 1, file_rendezvous(tmp_path / "rendezvous")) as device,
        open_session(request, 0, device) as session,
    ):
        report = run_trial(session, task, FolderChannel(tmp_path))
        first, second = (session.epoch(0).step(number).samples for number in task.timed_steps)
    assert ran == [first, first, second]
    assert len(report.step_seconds) == 2
    assert report.samples == first + second
    parts = report.stage
    spent = parts.load_seconds + parts.forward_seconds + parts.backward_seconds + parts.optimizer_seconds
    assert spent + parts.idle_seconds == pytest.approx(sum(report.step_seconds) / 2, rel=1e-3)


# --- a whole search and training ---

BRIEF = {
    "trials": 4,
    "time_limit": "15min",
    "trial_timeout": "15min",
    "warmup_steps": 0,
    "timed_steps": 1,
    "confirm_rounds": 1,
}


def run(*arguments: str) -> str:
    answer = CliRunner().invoke(main, [*arguments])
    assert answer.exit_code == 0, answer.stderr
    return answer.stdout + answer.stderr


@needs_compiler
@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.usefixtures("brief_profiles")
def test_a_profile_is_of_compiled_layers(
    shallow: Path, pool: WarmPool, compiling_pool: WarmPool, tmp_path: Path
) -> None:
    plain = profile_layers(prepared_of(shallow, tmp_path), pool, tmp_path)
    patient = prepared_of(shallow, tmp_path, training=COMPILED, search={"trial_timeout": "15min"})
    found = profile_layers(patient, compiling_pool, tmp_path)
    assert plain.compile_seconds is None
    assert found.compile_seconds is not None
    assert found.compile_seconds > 0
    size = (8.0, 500.0, 100_000.0, 1.0)
    for kind in ("vision", "language"):
        compiled, usual = (
            sum(value * coefficient for value, coefficient in zip(size, costs[kind].kept_bytes, strict=True))
            for costs in (found, plain)
        )
        assert compiled < usual
    layout = Layout(pipeline=1, data=2, zero=2)
    assert unprofiled(found, layout) is None
    assert unprofiled(found, replace(layout, zero=3)) is not None
    assert unprofiled(found, Layout(pipeline=1, data=1, tensor=2, zero=0)) is not None


@needs_compiler
@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.usefixtures("home", "brief_profiles")
def test_a_compiled_job_is_tuned_certified_and_trained_apart_from_the_plain_one(words: Path, tmp_path: Path) -> None:
    job = JobFile(words, tmp_path)
    path = job.spoil(search=BRIEF, training__compile=True)
    tuned = run("tune", path)
    assert "Layers are compiled." in tuned
    assert "holds" in tuned
    assert "; compiled layers)" in run("show", run("tune", path).split()[1])
    run("launch", path, "--steps", "2")
    code, said = refusal("launch", job.spoil(training__compile=False))
    assert (code, "no plan is known for this job here" in said) == (3, True)
    run("launch", job.spoil(training__compile=True))
    names = set[str]()
    for file in (job.output / "model").glob("*.safetensors"):  # one for each stage of the winner
        with safe_open(file, "pt") as weights:
            names |= set(weights.keys())
    assert "model.layers.0.self_attn.q_proj.weight" in names
    run("tune", job.spoil(training__compile=False))
    with open_store() as store:
        studies = [study.name for study in store.studies()]
    assert " times as fast as " in run("compare", *studies)


def examined(path: Path) -> dict[str, Any]:
    """Return what `doctor` says of a job."""
    document: dict[str, Any] = json.loads(CliRunner().invoke(main, ["doctor", str(path), "--json"]).stdout)
    return document


# --- what is refused ---


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("layout", "message"),
    parameters(
        {
            "ZeRO 3": ("p1-d2-z3", "training.compile does not work with ZeRO 3, whose"),
            "layers cut": ("p1-d1-t2-z0", "training.compile does not work with tensor degree 2"),
        },
        short=("ZeRO 3",),
    ),
)
def test_a_named_layout_that_cannot_be_compiled_is_refused_before_anything_is_measured(
    layout: str, message: str, shallow: Path, tmp_path: Path
) -> None:
    job = JobFile(shallow, tmp_path)
    job.spoil(training__compile=True, search__space={"layouts": [layout]})
    _, said = refusal("tune", job.path)
    assert "search.space.layouts: " in said
    assert message in said


def test_given_plans_that_cannot_be_compiled_are_refused(shallow: Path, tmp_path: Path) -> None:
    plain, compiled = prepared_of(shallow, tmp_path), prepared_of(shallow, tmp_path, training=COMPILED)
    for plan in (plan_of("4+2", data=2, zero=3), plan_of("4+2", tensor=2), plan_of("4+2s0,1")):
        check_plan(plain, plan)
        with pytest.raises(PlanNotValid, match=r"cannot train model: .*; use .*, or remove training\.compile"):
            check_plan(compiled, plan)


NO_COMPILER = "training.compile needs a compiler, and CXX=/nonexistent is none; install it, or remove training.compile"


@pytest.mark.usefixtures("home")
def test_a_machine_without_a_compiler_is_refused_before_anything_is_measured(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    job = JobFile(shallow, tmp_path)
    job.spoil(training__compile=True)
    code, said = refusal("tune", job.path)
    assert (code, NO_COMPILER in said) == (2, True)
    with locked(("cpu",)):  # so that no layers are tried, for which a process would import torch
        findings = examined(job.path)["findings"]
        job.spoil(training__compile=False)
        plain = examined(job.path)["findings"]
    assert any(f"{finding['what']}; {finding['remedy']}".startswith(NO_COMPILER) for finding in findings)
    assert not [finding for finding in plain if "compiler" in finding["what"]]


@pytest.mark.ranks
def test_a_rank_without_a_compiler_says_so(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiling_pool: WarmPool
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    prepared = prepared_of(words, tmp_path, training=COMPILED)
    answer = compiling_pool.ask(prepared.request(DATA, SHORT), 120)
    assert isinstance(answer, Crash)
    assert answer.detail.startswith(NO_COMPILER)
