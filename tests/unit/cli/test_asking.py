"""The question which plan to train with, where a baseline measured faster than the winner."""

import sys
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


@pytest.mark.parametrize("is_known", [True, False])
def test_run_asks_only_where_it_has_not_searched(
    is_known: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = SimpleNamespace(last_winner=lambda _: "best" if is_known else None)
    training = SimpleNamespace(output=tmp_path)
    prepared = SimpleNamespace(job=SimpleNamespace(training=training), workload=SimpleNamespace(fingerprint=""))
    given: dict[str, Any] = {
        "with_values": lambda *_: SimpleNamespace(training=training, database=None),
        "training_bench": lambda *_: nullcontext(SimpleNamespace(store=store, prepared=prepared)),
        "check_begun": lambda _: None,
        "check_new": lambda *_: None,
        "Tuner": lambda *_: SimpleNamespace(tune=lambda **_: "best"),
        "trials_behind": lambda *_: (),
    }
    for name, value in given.items():
        monkeypatch.setattr(work, name, value)
    asked: list[str] = []

    def choose(*arguments: Any) -> None:
        keeps: Keeps = arguments[-1]
        keeps(rival(may_win=True))
        raise Chosen

    monkeypatch.setattr(work, "trusted", choose)
    monkeypatch.setattr(study_report, "best_text", lambda *_: "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda question, **_: asked.append(question))
    file: Any = SimpleNamespace(job=None)
    with pytest.raises(Chosen):
        run_job(OPTIONS, file, retune_on_drift=False, launcher=None, submit=False)
    assert len(asked) == is_known
