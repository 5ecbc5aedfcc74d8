"""The base of all errors, those of preparing and running a plan, and how much their messages quote.

AutotuneError              of the three packages: in `autotune.errors`, in `storage.errors`, and here
`-- TrialsError
    |-- InvalidPlan        the plan does not fit the model or itself
    |-- UnknownName        no module of that name: a model family, dataset format, packer or sampler
    |-- DataError          a dataset that cannot be read, or a bad line when the job says `on_error: fail`
    |   |-- PassingFault   this machine cannot read an image or a video now
    |   `-- AllSkipped     no sample fits into a pack, and the job skips such samples
    |-- ModelError         a model folder that cannot be used
    |-- NoDecoder          a package without which video files cannot be decoded is missing
    |-- NoCompiler         a tool without which layers cannot be compiled is missing
    |-- OutputTaken        a training's output folder holds results of something else
    |-- Unwritable         a checkpoint, a model or a socket cannot be written to the disk
    |-- SharedMemoryFull   data workers have no room to pass packs to their rank
    |-- NotFinite          a loss or gradient is NaN or infinite
    |-- SiteError          settings with which no rank can be started on the nodes of the job
    |-- NodesMissing       a node of the job has not come, or has been lost
    |-- NodeRefused        a node has other devices or other software than this one
    `-- WireError          a message between the agent and its ranks that cannot be decoded
        |-- NotSigned      its sender does not have the token of the agent
        `-- OtherForm      it has other fields than this version's
"""

import re

_LONGEST_WORD, _WORD_BEGIN, _WORD_END = 160, 90, 40
"""Characters of the longest word that is shown whole, and those kept of both ends of a longer one."""
_LONGEST_LINE, _LINE_BEGIN, _LINE_END = 1_500, 900, 400
_LONG = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


def in_brief(message: str) -> str:
    """Return a message whose long words and lines lack their middle, with the number of characters that they had."""
    return "\n".join(map(_line, message.split("\n")))


def in_one_line(message: str) -> str:
    r"""Return a message in brief with line feeds and other control characters written as `\n` or `\x1b`."""
    if message.isprintable():
        return _line(message)
    return _line("".join(each if each.isprintable() else _escaped(each) for each in message))


def shown_name(name: object) -> str:
    """Return a name or path for a message: in one line, without its middle if it is long, also with white space."""
    text = in_one_line(str(name))
    return text if len(text) <= _LONGEST_WORD else _ends(text, _WORD_BEGIN, _WORD_END)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _line(line: str) -> str:
    brief = _LONG.sub(lambda word: _ends(word[0], _WORD_BEGIN, _WORD_END), line)
    return brief if len(brief) <= _LONGEST_LINE else _ends(brief, _LINE_BEGIN, _LINE_END)


def _ends(text: str, begin: int, end: int) -> str:
    return f"{text[:begin]}...({len(text)} characters)...{text[-end:]}"


class AutotuneError(Exception):
    """Base of every error that this software raises; the message names the value, in brief, and the remedy."""

    def __init__(self, message: object = "") -> None:
        super().__init__(in_brief(str(message)))


class TrialsError(AutotuneError):
    """Base of every error of this package."""


class InvalidPlan(TrialsError):
    """The plan does not fit the model or contradicts itself."""


class UnknownName(TrialsError):
    """No module of that name exists in the package."""


class DataError(TrialsError):
    """The dataset cannot be read as the job describes it."""


class PassingFault(DataError):
    """An image or a video cannot be read here and now, for lack of rights or of a codec, or by a fault of the disk."""


class AllSkipped(DataError):
    """No sample fits into a pack, and `data.oversize: skip` leaves them all out."""


class ModelError(TrialsError):
    """The model folder cannot be used for training."""


class NoDecoder(TrialsError):
    """A package is missing without which video files cannot be decoded."""


class NoCompiler(TrialsError):
    """A tool is missing without which layers cannot be compiled."""


class OutputTaken(TrialsError):
    """The training's output folder holds results of something else, which a training would mix with its own."""


class Unwritable(TrialsError):
    """A checkpoint, a model or a socket of data workers cannot be written to the disk."""


class SharedMemoryFull(TrialsError):
    """Data workers have no room in /dev/shm to pass packs to their rank."""


class NotFinite(TrialsError):
    """A loss or gradient is NaN or infinite."""


class WireError(TrialsError):
    """A message between the agent and its ranks cannot be decoded."""


class SiteError(TrialsError):
    """No rank can be started on the nodes of the job with these settings."""


class NodesMissing(TrialsError):
    """A node of the job has not come, or has been lost."""


class NodeRefused(TrialsError):
    """A node has other devices or other software than this one, so that trials on both would not hold."""


class NotSigned(WireError):
    """The sender of a message does not have the token of the agent."""


class OtherForm(WireError):
    """The message lacks a field or has an unknown one: another version may have written it."""
