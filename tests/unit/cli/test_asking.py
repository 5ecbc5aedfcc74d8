"""The question which plan to train with, where a baseline measured faster than the winner."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from autotune.cli import work
from autotune.cli.context import Options
from autotune.cli.work import asking, run_job
from autotune.plan_choice import Keeps
from autotune.results import study_report
from autotune.results.rival import Rival
from autotune.training.plan_change import why_kept
from tests.values.storage import packed_plan

OPTIONS = Options(as_json=False, database=None, verbose=0, quiet=False)


def rival(*, may_win: bool) -> Rival:
    only_compared = None if may_win else "search.space leaves it out"
    return Rival(
        plan_id="ab",
        role="omnibal",
        speed_ratio=1.3,
        speed_ratio_error=0.1,
        is_disturbed=False,
        only_compared=only_compared,
    )


@pytest.mark.parametrize("may_win", [True, False])
def test_without_a_terminal_nothing_is_asked_and_the_space_decides(
    may_win: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert asking(OPTIONS)(rival(may_win=may_win)) is not may_win
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("may_win", [True, False])
def test_a_terminal_is_asked_and_told_what_the_space_leaves_out(
    may_win: bool, answer: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, object]] = []

    def confirm(question: str, *, default: bool, **_: object) -> bool:
        asked.append((question, default))
        return answer

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "confirm", confirm)
    assert asking(OPTIONS)(rival(may_win=may_win)) is not answer
    # The default is what happens without a terminal.
    assert asked == [("Train with omnibal (ab), in place of the best plan?", may_win)]
    said = capsys.readouterr().err
    assert "The best plan is in doubt: omnibal (ab) measured faster" in said
    assert ("search.space leaves it out" in said) is not may_win


class Chosen(Exception):
    """Ends the command where it has chosen a plan."""


@pytest.fixture
def prepared_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Run a job of which a plan is known, or is found, and whose table is "TABLE"."""
    training = SimpleNamespace(output=tmp_path)
    prepared = SimpleNamespace(job=SimpleNamespace(training=training), workload=SimpleNamespace(fingerprint=""))

    def run(best: object, choose: Callable[..., object], *, is_known: bool = True) -> None:
        store = SimpleNamespace(last_winner=lambda _: best if is_known else None)
        given: dict[str, Any] = {
            "with_values": lambda *_: SimpleNamespace(training=training, database=None),
            "training_bench": lambda *_: nullcontext(SimpleNamespace(store=store, prepared=prepared)),
            "check_begun": lambda _: None,
            "check_new": lambda *_: None,
            "Tuner": lambda *_: SimpleNamespace(tune=lambda **_: best),
            "trials_behind": lambda *_: (),
            "trusted": choose,
            "certified": end,
        }
        for name, value in given.items():
            monkeypatch.setattr(work, name, value)
        monkeypatch.setattr(study_report, "best_text", lambda *_: "TABLE")
        file: Any = SimpleNamespace(job=None)
        with pytest.raises(Chosen):
            run_job(OPTIONS, file, retune_on_drift=False, launcher=None, submit=False)

    return run


def end(*_: object, **__: object) -> None:
    raise Chosen


@pytest.mark.parametrize("is_known", [True, False])
def test_run_asks_only_where_it_has_not_searched(
    is_known: bool, prepared_run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def choose(*arguments: Any) -> None:
        keeps: Keeps = arguments[-1]
        keeps(rival(may_win=True))
        raise Chosen

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda question, **_: asked.append(question))
    prepared_run("best", choose, is_known=is_known)
    assert len(asked) == is_known


@pytest.mark.parametrize("is_best", [True, False])
def test_run_shows_the_best_plan_where_it_trains_with_it(
    is_best: bool, prepared_run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    best, other = (SimpleNamespace(plan=packed_plan(number)) for number in (1, 2))
    prepared_run(best, lambda *_: best if is_best else other)
    assert ("TABLE" in capsys.readouterr().out) is is_best


@pytest.mark.parametrize("is_tried", [True, False])
def test_a_training_keeps_its_plan_for_those_that_it_had(is_tried: bool) -> None:
    own, other = packed_plan(1), packed_plan(2)
    record: Any = SimpleNamespace(
        settings=SimpleNamespace(plan=own.id), failed=(other.id,) if is_tried else (), changes=()
    )
    assert [bool(why_kept(record, plan)) for plan in (own, other)] == [False, is_tried]
