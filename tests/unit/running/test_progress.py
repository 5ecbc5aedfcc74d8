"""Progress of reading data, on stderr."""

import sys
from io import StringIO

import pytest

from autotune.cli import progress
from autotune.cli.context import Options
from autotune.cli.progress import reading_progress
from trials.data.indexing import Reading


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def progress_text(options: Options, monkeypatch: pytest.MonkeyPatch, stream: StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with reading_progress(options) as tell:
        assert not stream.getvalue()
        tell(Reading(records=1000, share=None))
        tell(Reading(records=23456, share=0.5))
    return stream.getvalue()


def options(*, quiet: bool = False) -> Options:
    return Options(as_json=False, database=None, verbose=0, quiet=quiet)


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = progress_text(options(), monkeypatch, Terminal())
    assert "Reading the data" in text
    assert "23,456 records" in text
    assert "50%" in text
    assert not capsys.readouterr().out


def test_a_pipe_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not progress_text(options(), monkeypatch, StringIO())
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    first, second = progress_text(options(), monkeypatch, StringIO()).splitlines()
    assert first.startswith("  1000 records read, ")
    assert second.startswith("  23456 records read, ")
    assert second.endswith("/s, 50%")
    assert not capsys.readouterr().out


@pytest.mark.parametrize("stream", [Terminal(), StringIO()], ids=["terminal", "pipe"])
def test_quiet_prints_nothing(monkeypatch: pytest.MonkeyPatch, stream: StringIO) -> None:
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    assert not progress_text(options(quiet=True), monkeypatch, stream)
