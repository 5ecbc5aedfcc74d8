"""Shared parts of all commands: output, errors and the database URL."""

import atexit
import functools
import gc
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import click

from autotune.cli import os_errors
from autotune.cli.display.display import Display
from autotune.cli.visible import VisibleFormatter, visible
from autotune.database_setting import chosen_database
from autotune.errors import exit_code
from autotune.results.text_table import fitted
from trials import streams
from trials.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.events import Phase
    from autotune.job_file import JobFile
    from trials.job import Job

Handler: TypeAlias = Callable[[int, FrameType | None], Any]
"""Handler of a signal."""
_log = logging.getLogger(__name__)
_OWN = ("autotune", "storage", "trials")
"""Packages of this project, by which its loggers are named."""
_OBJECTS_BETWEEN_COLLECTIONS = 500_000
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A choice: ranks are killed after seconds, and a database that is locked is awaited for half a minute.
_CLEAN_UP_SECONDS = 60.0
"""Time after a signal in which further ones are ignored."""
_STOP_SECONDS = 600.0
"""Limit for the current step of a training and its checkpoint: a step takes seconds to a few minutes."""


class Terminated(KeyboardInterrupt):
    """A request to end, by Ctrl-C or a scheduler; measurements are kept."""

    def __init__(self, number: int, ending: str | None = None) -> None:
        super().__init__()
        self.exit_code = 128 + number
        """128 and the number of the signal, as shells report it."""
        self.ending = ending
        """What was reached, and what goes on with it; None where the command is to say what is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of every command."""

    as_json: bool
    database: str | None
    verbose: int
    quiet: bool
    display: Display = field(default_factory=Display)
    """The listener of everything that the command does."""
    receiver: Callable[[Mapping[str, Any]], None] | None = None
    """Takes the result, which is not printed then."""

    def give(
        self, document: Callable[[], Mapping[str, Any]], text: Callable[[], str], *, is_code: bool = False
    ) -> None:
        """Print the result as JSON or text; at a terminal long lines are folded, unless the text `is_code`.

        A `receiver` gets it instead. Raise AutotuneError for NaN in JSON, or when stdout cannot be written.
        """
        self.display.close()  # stdout may be the same terminal
        if self.receiver is not None:
            self.receiver(document())
            return
        result = document_text(document()) if self.as_json else visible(text() if is_code else fitted(text()))
        _print((f"{result}\n",))

    def give_lines(self, lines: Iterable[str]) -> None:
        """Print the lines of a file, with their ends. Raise AutotuneError when stdout cannot be written."""
        self.display.close()
        _print(lines)

    def give_early(self, text: Callable[[], str]) -> None:
        """Print a part of the text result early. Errors are left to `give` at the end."""
        self.display.close()
        if not self.as_json and sys.stdout is not None:
            with suppress(OSError):
                click.echo(visible(fitted(text())))

    def ask(self, question: str, *, default: bool = False) -> bool:
        """Return the answer to a question at the terminal; a signal raises Terminated, however many came before."""
        self.display.close()
        received: list[int] = []
        is_asking = True

        def stop(number: int, _frame: FrameType | None) -> None:
            if is_asking:
                received.append(number)
                raise Terminated(number)

        # The built-in `input` drops what a signal raises while it flushes stderr, so that the first one may be lost.
        with _handled(stop) as before:
            try:
                return click.confirm(visible(question), default=default, err=True)
            except (click.Abort, Terminated):
                is_asking = False
                if not received:  # the end of the input
                    raise
        # It counts as the first signal of the command, so that later ones do not interrupt the clean-up.
        before[signal.Signals(received[0])](received[0], None)
        raise Terminated(received[0])

    def database_url(self, of_job: str | None = None) -> str | None:
        """Return `--db`, else what `chosen_database` returns."""
        return chosen_database(self.database, of_job)


def _print(lines: Iterable[str]) -> None:
    if sys.stdout is None:  # click would print nothing, without an error
        raise AutotuneError("the result cannot be written to stdout: it is closed; write it elsewhere")
    for line in lines:
        try:
            click.echo(line, nl=False)
        except BrokenPipeError:  # the reader has closed the pipe; click ends quietly
            raise
        except OSError as error:
            raise AutotuneError(
                f"the result cannot be written to stdout: {error.strerror}; write it elsewhere"
            ) from error


def document_text(document: Mapping[str, Any], indent: int | None = 2) -> str:
    """Return a result as JSON. Raise AutotuneError for numbers that are not finite, which JSON has not."""
    try:
        return json.dumps(document, indent=indent, allow_nan=False)
    except ValueError as error:
        raise AutotuneError(
            f"the result cannot be written as JSON ({error}); run the command without --json"
        ) from error


def guarded(command: Callable[..., None], *, starts_ranks: bool) -> Callable[..., None]:
    """Pass Options to the command, and turn an error of this project into one message and an exit code.

    Output to a stderr that is closed or full is dropped. A command that `starts_ranks`, which inherit the environment,
    leaves that as the user has set it.
    """

    @functools.wraps(command)
    def run(*, as_json: bool, db: str | None, verbose: int, quiet: bool, **arguments: Any) -> None:
        # Collecting garbage while modules are imported takes a fifth of a look-up's CPU time, and finds nothing.
        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        # The interpreter's last collection takes another fourth, for memory that the exit frees in any case.
        atexit.register(gc.freeze)
        if not starts_ranks:
            # Before its first value pydantic reads the entry points of every installed package for plugins.
            os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        streams.keep_stderr_open()
        context = click.get_current_context(silent=True)
        before = context.find_root().params if context else {}  # the same options before the command's name
        name = context.command_path.removeprefix(context.find_root().command_path).strip() if context else ""
        options = Options(
            as_json=as_json or before.get("as_json", False),
            database=before.get("db") if db is None else db,
            verbose=verbose + before.get("verbose", 0),
            quiet=quiet or before.get("quiet", False),
            display=Display(name or "autotune", quiet=quiet or before.get("quiet", False)),
        )
        _configure_logging(options)
        try:
            with _polite_signals():
                _displayed(options.display, functools.partial(command, options, **arguments))
        except AutotuneError as error:
            click.echo(visible(f"Error: {error}"), err=True)
            sys.exit(exit_code(error))
        except OSError as error:
            if error.errno is None or isinstance(error, BrokenPipeError):  # no refusal; click ends quietly
                raise
            _log.debug("traceback of the refused call", exc_info=error)
            click.echo(visible(f"Error: {os_errors.message(error)}"), err=True)
            sys.exit(os_errors.exit_code(error))
        except Terminated as request:
            measures = starts_ranks and not arguments.get("dry_run")
            kept = _kept_text(arguments, options.display.phase) if measures else "Interrupted."
            click.echo(request.ending or kept, err=True)
            sys.exit(request.exit_code)

    return run


def _kept_text(arguments: Mapping[str, Any], phase: "Phase | None") -> str:
    if phase == "profile":
        return "Interrupted in the profile, of which no part is kept; all else is, and the same command goes on."
    again = "the same command without --fresh" if arguments.get("fresh") else "the same command"
    kept = "the training is kept to its last checkpoint" if phase == "training" else "what was measured is kept"
    return f"Interrupted; {kept}, and {again} goes on."


def _displayed(display: Display, command: Callable[[], None]) -> None:
    display.expect_work()
    try:
        command()
    finally:
        display.close()


@contextmanager
def _polite_signals() -> Iterator[None]:
    """Raise Terminated for the first SIGINT, SIGTERM or SIGHUP, and ignore those of the next minute.

    A second one would interrupt the clean-up, which ends the ranks and stores their results. Signals that are ignored
    already stay ignored: SIGHUP under nohup, SIGINT in the background of a script.
    """
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    handled = [each for each, how in before.items() if how in (signal.SIG_DFL, signal.default_int_handler)]
    received: list[float] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        now = monotonic()
        if not received or now > received[-1] + _CLEAN_UP_SECONDS:
            received.append(now)
            raise Terminated(number)

    for each in handled:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each in handled:  # on exit the interpreter restores the default of every signal with a handler
            signal.signal(each, signal.SIG_IGN if received else before[each])


def inspect_job(options: Options, file: "JobFile", *, uses_devices: bool = False, submits: bool = False) -> None:
    """Read the job, and refuse devices in use, and a model or data that are not there, before torch is imported.

    What `submits` the command runs it on other machines, whose devices and files are not looked for here. Then show
    that the command works, since the import takes seconds.
    """
    job = file.job
    if uses_devices and not submits:
        from autotune.machine.job_hardware import check_free

        check_free(job)
    if not submits:
        check_model_and_data(job)
    from autotune.events import Phase, PhaseBegan

    options.display(PhaseBegan(phase=Phase.PROBE, text="Inspecting the model, the data and the hardware"))


def check_model_and_data(job: "Job") -> None:
    """Raise ModelError for a model that is not there, and DataError for data that are not there or in no known form."""
    from trials.data import formats
    from trials.model.refusals.folder import check_place

    check_place(job.model.path)
    for source in (*job.data.sources, *(job.evaluation.sources or ())):
        formats.resolve(source, Path())


class NotedSignal:
    """The first signal inside `first_signal_noted`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._end_by = math.inf

    def stops(self, show: Callable[[str], None]) -> bool:
        """Return whether there was a signal, and `show` the user why the first time.

        Raise Terminated when the training has had its time to stop.
        """
        if self.number is None:
            return False
        if self._end_by == math.inf:
            self._end_by = monotonic() + _STOP_SECONDS
            show(
                "Stopping: the ranks finish their step and write a checkpoint, for which they have "
                f"{_STOP_SECONDS / 60:.0f} minutes; a second signal ends them at once"
            )
        if monotonic() > self._end_by:
            _log.warning(
                "the ranks have not stopped within %.0f minutes and are ended; the same command goes on from the last "
                "checkpoint",
                _STOP_SECONDS / 60,
            )
            raise Terminated(self.number)
        return True


@contextmanager
def first_signal_noted() -> Iterator[NotedSignal]:
    """Provide the first SIGINT, SIGTERM or SIGHUP, instead of raising Terminated for it. The second one raises it."""
    noted = NotedSignal()

    def note(number: int, frame: FrameType | None) -> None:
        if noted.number is None:
            noted.number = number
        else:
            handlers[signal.Signals(number)](noted.number, frame)

    with _handled(note) as handlers:
        yield noted


@contextmanager
def _handled(handle: Handler) -> Iterator[Mapping[signal.Signals, Handler]]:
    """Replace the handlers of signals by `handle` inside the context, and provide the earlier ones."""
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    handlers = {each: how for each, how in before.items() if callable(how)}
    for each in handlers:
        signal.signal(each, handle)
    try:
        yield handlers
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _configure_logging(options: Options) -> None:
    # Warnings that -q does not show are still counted by `doctor`.
    level = (
        logging.WARNING if options.quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(options.verbose, 2)]
    )
    handler = _StderrHandler()
    handler.setFormatter(VisibleFormatter("%(levelname)s: %(message)s"))
    handler.setLevel(logging.ERROR if options.quiet else logging.NOTSET)
    # Other libraries keep WARNING, so that -vv shows the messages of this project only.
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in _OWN:
        logging.getLogger(name).setLevel(level)
    # Only ranks run DeepSpeed; where it is imported here, it would say that this process has no accelerator.
    logging.getLogger("DeepSpeed").addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class _KeptWarnings(logging.Handler):
    """Handler that keeps the warnings of this project."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in _OWN:
            self.texts.append(record.getMessage())


@contextmanager
def warnings_kept() -> Iterator[list[str]]:
    """Provide a list, to which the warnings of this project are added, as they are shown elsewhere, too."""
    kept = _KeptWarnings()
    logging.getLogger().addHandler(kept)
    try:
        yield kept.texts
    finally:
        logging.getLogger().removeHandler(kept)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the present `sys.stderr`, which a live display replaces, so that lines appear above it."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Ignore the stream of the constructor."""
