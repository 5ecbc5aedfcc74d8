"""What the program does with the files of each kind, without ranks, and what must hold afterwards."""

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from types import TracebackType

from click.testing import CliRunner

from autotune.cli import main
from autotune.job_file import load_job
from autotune.plan_file import read_plan
from autotune.prediction.predictor import Predictor
from autotune.search.baselines import baselines
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.capacities import holds_all
from autotune.search.space.feasible import feasible_space
from autotune.search.tuner import Tuner
from autotune.workbench import workbench
from storage.database.url import parse
from storage.spool import Spool
from storage.store import open_store
from tests.fuzz.request import Kind
from tests.fuzz.specimens import DATA, JOB, MODEL, PLAN, PROFILE, Specimens
from tests.values.search import COSTS
from trials import wire
from trials.data import containers, formats
from trials.data.formats import AnnotationFile, Place
from trials.data.records.census import Miscounted
from trials.data.records.record import RecordError
from trials.data.records.sample import BadLine, Measured, Sample
from trials.data.records.watched import OTHERS
from trials.errors import DataError, TrialsError
from trials.job import Job, Source
from trials.plan import Plan
from trials.tasks.training.progress import Line, Progress, ProgressReader, append_line, drop_steps_after

_ADDED = "unheard of"
"""A key that no format has."""
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters of a terminal, except newline and tab."""
_EXIT_CODES = range(7)
_PACK_OPTIONS: tuple[tuple[str, list[str]], ...] = (
    ("--qv", ["0", "4", "12", "2147483647"]),
    ("--qt", ["1", "512", "4096", "2147483647"]),
    ("--oversize", ["skip", "fail", "own-pack", "truncate"]),
    ("--packer", ["isf", "best-fit", "cutting-stock"]),
    ("--data-parallel", ["1", "3", "65536"]),
)
_MOST_BYTES = 16 << 20
"""Most bytes of a file whose content is compared."""
_FORMATS = ("auto", "auto", "auto", "internvl", "lengths", "llama-factory", "messages", "prompt-completion", "swift")
_LOOKING = (["db", "check"], ["studies"], ["plans"], ["plans", "--here"], ["doctor"])
"""Commands that must work with any stored data."""


class Entries:
    """Pass a case to the program. A refusal raises an error of this project; any other exception is a fault."""

    def __init__(self, specimens: Specimens) -> None:
        self.specimens = specimens
        self._plan = read_plan(specimens.folder / PLAN)

    def of(self, kind: Kind) -> Callable[[Path, Random], bool]:
        """Return a function that uses the files in a folder and returns whether they were accepted."""
        found: Callable[[Path, Random], bool] = getattr(self, f"_{kind}")
        return found

    def _jobs(self, case: Path, dice: Random) -> bool:
        self._lay_out(case, MODEL, DATA, PLAN)
        url = self._database(case, "known.db")
        _run(dice, "launch", case / JOB, "--dry-run", "--db", url)  # no plan may be known for what it has become
        job = load_job(case / JOB)
        assert Job.model_validate_json(job.model_dump_json()) == job
        if job.database is not None:
            parse(job.database)
        if dice.random() < 0.5:
            return _searched(job, url)
        return _run(dice, "predict", case / JOB, "--db", url, "--top", "2")

    def _plans(self, case: Path, dice: Random) -> bool:
        path = _only(case)
        ours = self.specimens.folder
        if not _run(dice, "predict", ours / JOB, "--device-profile", ours / PROFILE, "--plan", path):
            return False
        plan = read_plan(path)
        assert wire.decode(Plan, wire.encode(plan)) == plan
        return True

    def _lengths(self, case: Path, dice: Random) -> bool:
        out, path = case / "packs.jsonl", max(case.iterdir(), default=case / "lengths.json")  # a meta file comes last
        options = [option for option in _PACK_OPTIONS if dice.random() < 0.3]
        given = [part for name, values in options for part in (name, dice.choice(values))]
        if not _run(dice, "pack", path, "--out", out, *given):
            assert not out.exists()
            return False
        packed = [sample for line in out.read_text().splitlines() for sample in json.loads(line)["samples"]]
        assert len(set(packed)) <= len(packed)
        return True

    def _annotations(self, case: Path, dice: Random) -> bool:
        """Read everything twice, as indexing and training do."""
        source = Source(path=max(case.iterdir(), default=case / "absent.jsonl"), format=dice.choice(_FORMATS))
        try:
            for file in formats.resolve(source, case):
                for chunk in formats.chunks(file):
                    assert formats.digest(file, chunk)
                    for place, found in formats.records(file, chunk):
                        assert isinstance(found, Sample | Measured | BadLine)
                        assert not isinstance(found, BadLine) or str(found).encode()
                        assert isinstance(formats.read(file, place), Sample | BadLine)
                        assert isinstance(found, BadLine) or _names_addition(file, place)
        except DataError as error:
            if isinstance(error.__cause__, Miscounted):
                raise AssertionError(str(error)) from error
            raise
        return True

    def _results(self, case: Path, dice: Random) -> bool:
        path = _only(case)
        is_result = path.is_file() and path.stat().st_size < _MOST_BYTES
        before = path.read_bytes() if is_result else None
        folder = case / "spool"
        folder.mkdir()
        waiting = folder / path.name
        if os.path.lexists(path):
            path.rename(waiting)
        url = self._database(case, "known.db")
        with open_store(url) as store:
            stored = Spool(folder).replay(store)
        left = {each.name: each.read_bytes() for each in folder.iterdir() if before is not None}
        assert before is None or stored or before in left.values(), f"the result is lost: {before!r}, {left}"
        if stored:
            self._check_lookups(url, dice)
        return bool(stored)

    def _bundles(self, case: Path, dice: Random) -> bool:
        url = self._database(case, dice.choice(["empty.db", "known.db"]))
        before = _content(case / "store.db")
        if not _run(dice, "db", "import", case / "bundle.jsonl", "--db", url):
            assert _content(case / "store.db") == before, "a bundle that is refused leaves rows"
            return False
        self._check_lookups(url, dice)
        with open_store(url) as store:
            studies = store.studies()
            again = case / "again.jsonl"
            again.write_text("".join(store.export_studies([each.id for each in studies if each.finished], "here")))
        for study in studies[:1]:
            assert _run(dice, "studies", study.id, "--db", url), "a study cannot be shown after it"
        if dice.random() < 0.3:
            (case / "there").mkdir()
            there = self._database(case / "there", "empty.db")
            assert _run(dice, "db", "import", again, "--db", there), "what came with it cannot be passed on"
        return True

    def _profiles(self, case: Path, dice: Random) -> bool:
        ours = self.specimens.folder
        plan = dice.choice([("--top", "2"), ("--plan", str(ours / PLAN))])
        devices = ("--devices", dice.choice(["1", "4"])) if dice.random() < 0.3 else ()
        return _run(dice, "predict", ours / JOB, "--device-profile", case / PROFILE, *plan, *devices)

    def _models(self, case: Path, dice: Random) -> bool:
        model = case / MODEL
        model.mkdir()
        for path in case.iterdir():
            if path != model:
                path.rename(model / path.name)
        self._lay_out(case, DATA)
        weights = dice.choice(["random", "pretrained"])
        job = self.specimens.job.model_dump(mode="json", exclude_none=True)
        job["model"] |= {"path": str(model), "weights": weights}
        (case / JOB).write_text(json.dumps(job))
        if dice.random() < 0.5:  # which takes models that cannot be trained here, too
            return _run(dice, "pack", case / JOB)
        return _run(dice, "doctor", case / JOB, "--db", self._database(case, "empty.db"))

    def _progress(self, case: Path, dice: Random) -> bool:
        """Part of the file exists before the training; the rest is appended while it is followed."""
        path = case / "progress.jsonl"
        if not path.is_file():
            return False  # a training makes its output itself
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
        cuts = sorted(dice.randrange(len(content) + 1) for _ in range(2))
        path.write_bytes(content[: cuts[0]])
        seen = list[Line]()
        reader = ProgressReader(path, seen.append)
        for end in (cuts[1], len(content)):
            path.write_bytes(content[:end])
            _check_harmless(reader.look)
        last = Progress(step=7, of=9, loss=0.5, seconds=0.25, samples=16)
        append_line(path, last)
        _check_harmless(reader.look)
        assert seen[-1] == last, "a step behind what is no step is lost"
        assert reader.training_samples_per_second is None or reader.training_samples_per_second > 0
        drop_steps_after(path, 6)
        assert wire.encode(last).encode() not in path.read_bytes(), "a step that is trained again stays"
        return True

    def _check_lookups(self, url: str, dice: Random) -> None:
        command = dice.choice(_LOOKING)
        assert _run(dice, *command, "--db", url), f"{' '.join(command)} fails after it"

    def _lay_out(self, case: Path, *names: str) -> None:
        for name in names:
            (case / name).symlink_to(self.specimens.folder / name)

    def _database(self, case: Path, template: str) -> str:
        shutil.copy(self.specimens.folder / template, case / "store.db")
        return f"sqlite:///{case}/store.db"


def _names_addition(file: AnnotationFile, place: Place) -> bool:
    """Return whether one more key of a usable record is named, or refused."""
    record = containers.load(file.container).read(file.path, place) | {_ADDED: 7}
    try:
        found = formats.load(file.format).read(record, file)
    except RecordError:
        return True
    return bool({f"the key `{_ADDED}`", OTHERS} & set(found.unused))


def _searched(job: Job, url: str) -> bool:
    """Do what a search does before its first trial."""
    with workbench(job, url) as bench:
        Tuner(bench)
        work = bench.prepared.workload
        limits = Limits(
            vision_layers=work.model.vision_layers,
            language_layers=work.model.language_layers,
            memory_limit_bytes=work.memory_limit_bytes,
        )
        predictor = Predictor(
            COSTS.with_workers(bench.prepared.job.data.workers or 0), bench.prepared.epoch, work.model.element_bytes
        )
        solver = Solver(predictor, limits)
        space = feasible_space(work, solver, remedy="raise it", wanted=job.search.space)
        assert all(space.allows(plan) for plan in space.starts)
        assert list(baselines(work, predictor, solver, limits, hold_all=holds_all(work)))
    return True


def _check_harmless(look: Callable[[], None]) -> None:
    """Read the file; no content may end a training, not even by a clear error."""
    try:
        look()
    except TrialsError as error:
        raise AssertionError(f"the training ends: {error}") from error


def _only(folder: Path) -> Path:
    """Return the only file in the folder, or a path that does not exist."""
    return next(folder.iterdir(), folder / "absent.json")


def _run(dice: Random, *arguments: object) -> bool:
    """Return whether the command succeeds. Raise its exception, or AssertionError for a bad message."""
    as_json = dice.random() < 0.5
    answer = CliRunner().invoke(main, [*map(str, arguments), *(["--json"] if as_json else [])])
    match answer.exc_info:
        case (_, BaseException() as error, TracebackType()) if not isinstance(error, SystemExit):
            raise error
    assert answer.exit_code in _EXIT_CODES, f"exit code {answer.exit_code}"
    assert not (found := _UNSEEN.search(answer.output)), f"{found and found[0]!r} in the output: {answer.output!r}"
    if answer.exit_code == 0:
        if as_json:
            json.loads(answer.stdout, parse_constant=partial(_refuse, "no number of JSON"))
        return True
    assert re.search(r"^Error: \S", answer.stderr, re.MULTILINE), f"no message: {answer.stderr!r}"
    assert "Traceback" not in answer.output, answer.output
    return False


def _refuse(what: str, text: str) -> None:
    raise AssertionError(f"{what}: {text}")


def _content(path: Path) -> str:
    with closing(sqlite3.connect(path)) as file:
        return "\n".join(file.iterdump())
