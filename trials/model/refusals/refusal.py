"""Exceptions of libraries about a model, turned into errors of this package."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from trials.errors import ModelError, TrialsError

INSTALL = "install it in the Python that runs autotune"
# A choice: about three lines; libraries append whole configurations to their messages.
_LONGEST = 300
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENOMEM)
"""Errors of the machine, which no change to a model mends."""


@contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Raise ModelError with `what` cannot be done, the library's reason and the remedy, in one line.

    Errors of the machine, such as a full disk, pass unchanged.
    """
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        if error.errno in _OF_THE_MACHINE:
            raise
        raise ModelError(f"{what}: {reason(error)}; {remedy}") from error
    except ImportError as error:
        raise ModelError(f"{what}: {reason(error)}; {INSTALL}") from error
    except Exception as error:  # transformers and tokenizers check little: a damaged file raises errors of any kind
        raise ModelError(f"{what}: {reason(error)}; {remedy}") from error


def reason(error: Exception) -> str:
    """Return the first paragraph of a library's message in one line, or the job file's remedy for remote code."""
    if "trust_remote_code" in str(error):
        return "it runs code of its own; read that code, then set model.trust_remote_code: true in the job file"
    text = " ".join(str(error).strip().partition("\n\n")[0].split())
    if not isinstance(
        error, OSError | ValueError | ImportError | TrialsError
    ):  # `'eight'` of a KeyError says nothing by itself
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
