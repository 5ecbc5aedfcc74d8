"""The display at terminals of several widths, at a dumb one, and at none."""

import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable
from io import StringIO

import pytest

from autotune.cli.context import Options, Terminated, _StderrHandler
from autotune.cli.display import display as displays
from autotune.cli.display import line_view, live_view
from autotune.cli.display.board import Board
from autotune.cli.display.display import Display, View
from autotune.cli.display.line_view import LineView
from autotune.cli.display.live_view import LiveView
from autotune.cli.visible import VisibleFormatter
from autotune.events import Event, Note, Phase, PhaseBegan
from tests.programs.processes import WAIT_SECONDS, wait_for
from tests.programs.terminals import terminal
from tests.values.display import PLAN, SEARCH, TRAINING
from tests.values.storage import PADDED_PLAN

ESCAPES = "name\x1b[2J\x1b]0;pwned\x07\x9b2K"


def hear(display: Display, events: Iterable[Event]) -> None:
    for event in events:
        display(event)


# --- live ---


@pytest.mark.parametrize("columns", [120, 80, 40])
def test_a_search_is_live_at_every_width(columns: int) -> None:
    with terminal(columns) as (display, screen):
        hear(display, SEARCH)
        screen.wait_for(f"trial 3 ({PLAN.id}) for")
        words, lines = screen.words, screen.lines()
        # Whole ids, wherever lines are folded: people copy them.
        assert all(plan.id in " ".join(lines) for plan in (PLAN, PADDED_PLAN))
        assert "trial 1 default failed: out of memory on stage 1" in words
        assert "2.29 +- 0.03 times as fast as default" in words
        assert "last failure: out of memory on stage 1" in words
        assert max(map(len, lines)) <= columns
        # Words are folded whole.
        assert {"disturbed", "Inspecting", "pipeline", "recompute"} <= set(re.findall(r"\w+", screen.text))
        display.close()
        last = screen.lines()
        assert b"\x1b[?25h" in screen.written.rpartition(b"\x1b[?25l")[2]  # the cursor is shown again
    assert last[-1] == "Repeating the finalists in turns"
    assert [line for line in last if line.startswith("  trial ")] == [
        line for line in lines if line.startswith("  trial ")
    ]


def test_a_training_is_live_with_a_bar() -> None:
    with terminal(80) as (display, screen):
        hear(display, TRAINING)
        screen.wait_for("step 60 of 120, loss 5.650, 8.0 samples/s; about 2 min 00 s left")
        assert "waited for in 25.0% of the time" in screen.words
        assert "\u2501" * 10 in screen.text
        assert "  step 50/120  loss 5.750" in screen.text


def test_other_output_appears_above_and_is_never_torn() -> None:
    handler = _StderrHandler()
    handler.setFormatter(VisibleFormatter("%(levelname)s: %(message)s"))
    log = logging.getLogger("autotune.tests.display")
    log.addHandler(handler)
    with terminal(80) as (display, screen):
        hear(display, SEARCH[:10])
        log.warning("a warning of %s", "a thread")
        sys.stderr.write("of print\n")
        sys.stderr.write("[bold]without an end")
        sys.stderr.flush()
        hear(display, SEARCH[10:])
        screen.wait_for(f"trial 3 ({PLAN.id}) for")
        display.close()
        lines = screen.lines()
    log.removeHandler(handler)
    first = lines.index("WARNING: a warning of a thread")
    assert lines[first : first + 3] == ["WARNING: a warning of a thread", "of print", "[bold]without an end"]
    assert lines[first - 1] == "Searching with at most 14 trials in 5 min 00 s"
    assert lines[first + 3].startswith("  trial 0  sampled")


def test_escapes_and_markup_in_names_are_shown_and_never_obeyed() -> None:
    with terminal(120) as (display, screen):
        hear(display, [PhaseBegan(phase=Phase.PROBE, text=f"[bold]{ESCAPES}[/bold] :smile:")])
        display.show(f"[red]{ESCAPES}")
        display.close()
        text = screen.text
    neutral = r"name\x1b[2J\x1b]0;pwned\x07\x9b2K"
    assert f"[bold]{neutral}[/bold] :smile:\n[red]{neutral}" in text


def test_a_resized_terminal_is_filled_anew() -> None:
    with terminal(120) as (display, screen):
        hear(display, SEARCH[:-4])
        screen.wait_for("choosing the next plan")
        screen.resize(60)
        hear(display, SEARCH[-4:])
        screen.wait_for(f"trial 3 ({PLAN.id}) for")
        live = screen.lines()[screen.lines().index("Repeating the finalists in turns") + 1 :]
        assert max(map(len, live)) <= 60
        assert " ".join(" ".join(live).split()).count(f"trial 3 ({PLAN.id}) for") == 1
        screen.resize(100)
        display.show("a line after it")
        screen.wait_for("a line after it")
        display.close()
        assert screen.lines()[-1] == "a line after it"


def test_work_goes_on_while_the_terminal_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "_PATIENT_SECONDS", 0.01)
    with terminal(80) as (display, screen):
        for number in range(200):  # more than a terminal holds before someone reads it
            display.show(f"line {number} {'-' * 60}")
        screen.wait_for("line 199")


def test_without_utf_8_everything_is_ascii() -> None:
    with terminal(80, encoding="ascii") as (display, screen):
        hear(display, TRAINING)
        display.show("\u96ea")
        screen.wait_for("step 60 of 120")
        assert screen.written.isascii()
        assert "-" * 10 in screen.text
        assert r"\u96ea" in screen.lines()


def test_no_color_is_obeyed() -> None:
    with terminal(80, NO_COLOR="1") as (display, screen):
        hear(display, TRAINING)
        screen.wait_for("step 60 of 120")
        colours = re.findall(rb"\x1b\[([\d;]*)m", screen.written)
    assert not [code for code in colours if re.search(rb"(^|;)(3[0-8]|4[0-8]|9\d)(;|$)", code)]


def test_work_that_says_nothing_is_shown_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays, "_LATE_SECONDS", 0.01)
    with terminal(80) as (display, screen):
        display.expect_work()
        screen.wait_for("tune 0 s")
        display.close()
        assert not screen.text


def test_a_command_that_ends_soon_shows_nothing() -> None:
    with terminal(80) as (display, screen):
        display.expect_work()
        display.close()
        display._open_late()
        assert not screen.lines()
        assert screen.written == b""


def test_a_result_is_printed_below_a_closed_display(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(80) as (display, screen):
        options = Options(as_json=False, database=None, verbose=0, quiet=False, display=display)
        monkeypatch.setattr(sys, "stdout", sys.stderr)
        hear(options.display, SEARCH)
        options.give(dict, lambda: "the result " * 10)
        lines = screen.lines()
    assert lines[-3] == "Repeating the finalists in turns"
    assert [len(line.split()) for line in lines[-2:]] == [15, 5]


# --- lines ---


@pytest.mark.parametrize("kind", ["dumb", "unknown", ""])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(kind: str) -> None:
    with terminal(80, kind) as (display, screen):
        display.expect_work()
        hear(display, SEARCH)
        assert b"\x1b" not in screen.written
        assert "trial 1 default failed: out of memory on stage 1" in screen.words


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_a_pipe_gets_lines_whatever_the_environment_says(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := StringIO())
    monkeypatch.setenv(variable, "1")
    display = Display("tune")
    hear(display, SEARCH)
    display.close()
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().startswith("Inspecting the model, the data and the hardware\nReading the data\n")


def test_a_pipe_gets_a_line_when_none_came_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(sys, "stderr", stream := StringIO())
    board = Board("tune", lambda: now)
    view = LineView(board, lambda: now)
    for event in SEARCH[:10]:
        view.hear(event)
    written = stream.getvalue()
    assert view.look() == 4.0
    now += 3.9
    assert view.look() == pytest.approx(0.1)
    assert stream.getvalue() == written
    now += 0.1
    assert view.look() == 4.0
    line = f"  search, 4 s: 1 of at most 14 trials, trial 0 ({PLAN.id}) for 4 s, at most 1 min 36 s left\n"
    assert stream.getvalue() == written + line
    view.hear(Note(text="said"))
    now += 3.9
    view.look()
    assert stream.getvalue() == f"{written}{line}said\n"


def test_a_long_phase_gets_fewer_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(sys, "stderr", stream := StringIO())
    view = LineView(Board("tune", lambda: now), lambda: now)
    now += 3601
    assert view.look() == 30.0
    now += 29.9
    assert 0 < view.look() < 0.2
    assert stream.getvalue().count("\n") == 1


def test_the_thread_of_a_pipe_writes_lines_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_view, "_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", stream := StringIO())
    display = Display("tune")
    display(SEARCH[0])
    wait_for(lambda: "  probe, " in stream.getvalue())
    display.close()


def test_no_line_follows_a_closed_display(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(StringIO):
        def write(self, text: str, /) -> int:
            if threading.current_thread().name == "display":
                writing.set()
                time.sleep(0.2)
            return super().write(text)

    writing, before = threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(line_view, "_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", stream := Slow())
    display = Display("tune")
    display(SEARCH[0])
    assert writing.wait(WAIT_SECONDS)
    display.close()
    assert set(threading.enumerate()) <= before
    assert stream.getvalue().endswith("\n")


# --- neither ---


@pytest.mark.parametrize("columns", [80, None])
def test_quiet_shows_nothing(columns: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Display("tune", quiet=True)
    monkeypatch.setattr(displays, "_LATE_SECONDS", 0.0)
    if columns is None:
        monkeypatch.setattr(sys, "stderr", stream := StringIO())
        hear(quiet, SEARCH)
        quiet.show("a line")
        assert not stream.getvalue()
        return
    with terminal(columns) as (_, screen):
        quiet.expect_work()
        hear(quiet, SEARCH)
        quiet.show("a line")
        assert screen.text == ""
        assert screen.written == b""


# --- either ---


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_a_display_that_a_signal_keeps_from_starting_can_be_closed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: View) -> None:
        raise Terminated(signal.SIGTERM)

    for view in (LiveView, LineView):
        monkeypatch.setattr(view, "start", interrupt)
    with terminal(80, kind) as (display, screen):
        with pytest.raises(Terminated):
            display(SEARCH[0])
        display.close()
        assert not screen.text
