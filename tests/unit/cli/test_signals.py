"""Signals: what a command says that one ends, and in a training the first is noted and the second ends it."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest

from autotune.cli import context
from autotune.cli.context import NotedSignal, Options, Terminated, first_signal_noted, guarded
from autotune.events import Note, Phase, PhaseBegan
from trials.channels.folder import FolderChannel
from trials.tasks.stop import Stop, stop_requests


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def exit_code(act: Callable[[NotedSignal], None]) -> int:
    """Return the exit code with which `act` ends as a command would."""

    def command() -> None:
        with context._polite_signals(), first_signal_noted() as noted:
            act(noted)

    with pytest.raises(Terminated) as ended:
        command()
    return ended.value.exit_code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_second_signal_ends_with_the_code_of_the_first(number: signal.Signals) -> None:
    messages: list[str] = []

    def act(noted: NotedSignal) -> None:
        assert not noted.stops(messages.append)
        send(number)
        assert noted.stops(messages.append)
        assert noted.stops(messages.append)
        send(signal.SIGINT)

    assert exit_code(act) == 128 + number
    assert messages == [
        "Stopping: the ranks finish their step and write a checkpoint, for which they have 10 minutes; "
        "a second signal ends them at once"
    ]


def test_a_training_that_does_not_stop_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "_STOP_SECONDS", -1.0)

    def act(noted: NotedSignal) -> None:
        send(signal.SIGINT)
        noted.stops(lambda _: None)

    assert exit_code(act) == 130
    assert "the same command goes on from the last checkpoint" in caplog.text


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with context._polite_signals(), first_signal_noted() as noted:
        send(signal.SIGHUP)
        assert noted.number is None


OPTIONS = Options(as_json=False, database=None, verbose=0, quiet=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_question_ends_by_a_second_signal_where_the_first_is_lost(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: str) -> str:
        with suppress(Terminated):  # as the built-in `input` does, while it flushes stderr
            send(number)
        send(number)
        raise AssertionError("the second signal is lost too")

    monkeypatch.setattr("click.termui.visible_prompt_func", read)
    with context._polite_signals():
        with pytest.raises(Terminated) as ended:
            OPTIONS.ask("Train?")
        send(number)  # does not interrupt the clean-up
    assert ended.value.exit_code == 128 + number


def test_the_end_of_the_input_is_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("click.termui.visible_prompt_func", read)
    with context._polite_signals(), pytest.raises(click.Abort):
        OPTIONS.ask("Train?")


def test_a_clean_up_is_not_interrupted_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "monotonic", (times := iter((100.0, 101.0, 159.0, 161.0))).__next__)
    with context._polite_signals():
        with pytest.raises(Terminated):
            send(signal.SIGINT)
        send(signal.SIGINT)
        send(signal.SIGTERM)
        with pytest.raises(Terminated):
            send(signal.SIGTERM)
    assert not [*times]


def test_a_rank_is_asked_by_a_file_or_a_signal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests(FolderChannel(tmp_path)) as asked:
        assert asked() is None
        (tmp_path / Stop.AT_CHECKPOINT).touch()
        assert asked() is Stop.AT_CHECKPOINT
        (tmp_path / Stop.NOW).touch()
        assert asked() is Stop.NOW
        (tmp_path / Stop.NOW).unlink()
        send(signal.SIGTERM)
        assert asked() is Stop.NOW
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("starts_ranks", "arguments", "said"),
    [
        (True, {}, "Interrupted; what was measured is kept, and the same command goes on."),
        (
            True,
            {"fresh": True},
            "Interrupted; what was measured is kept, and the same command without --fresh goes on.",
        ),
        (True, {"dry_run": True}, "Interrupted."),
        (False, {}, "Interrupted."),
    ],
    ids=["measures", "afresh", "dry run", "looks up"],
)
def test_an_interrupted_command_says_whether_anything_was_measured(
    starts_ranks: bool, arguments: dict[str, bool], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(options: Options, **_: bool) -> None:
        raise Terminated(signal.SIGINT)

    with pytest.raises(SystemExit) as end:
        guarded(command, starts_ranks=starts_ranks)(as_json=False, db=None, verbose=0, quiet=True, **arguments)
    assert end.value.code == 130
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        (
            (Phase.LENGTHS, Phase.PROFILE),
            "Interrupted in the profile, of which no part is kept; all else is, and the same command goes on.",
        ),
        (
            (Phase.PROFILE, Phase.SEARCH),
            "Interrupted; what was measured is kept, and the same command without --fresh goes on.",
        ),
        (
            (Phase.SEARCH, Phase.TRAINING),
            "Interrupted; the training is kept to its last checkpoint, and the same command without --fresh goes on.",
        ),
    ],
    ids=["in the profile", "after it", "in a training"],
)
def test_an_interruption_says_what_of_its_phase_is_kept(
    phases: tuple[Phase, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(options: Options, **_: bool) -> None:
        for phase in phases:
            options.display(PhaseBegan(phase=phase, text="..."))
            options.display(Note(text="..."))
        raise Terminated(signal.SIGINT)

    with pytest.raises(SystemExit):
        guarded(command, starts_ranks=True)(as_json=False, db=None, verbose=0, quiet=True, fresh=True)
    assert capsys.readouterr().err == f"{said}\n"


def test_a_command_that_tells_how_it_ended_says_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    def command(options: Options) -> None:
        raise Terminated(signal.SIGINT, "Stopped after step 9 with a checkpoint")

    with pytest.raises(SystemExit):
        guarded(command, starts_ranks=True)(as_json=False, db=None, verbose=0, quiet=True)
    assert capsys.readouterr().err == "Stopped after step 9 with a checkpoint\n"
