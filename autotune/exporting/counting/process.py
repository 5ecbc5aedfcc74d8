"""Count tokens where a trainer is installed: `python process.py SCRIPT REQUEST ANSWER`, three files.

Nothing of autotune is imported, since that environment need not have it. SCRIPT has `counter`, which returns a function
from a record of the trainer's data to its tokens. REQUEST is a JSON object with `package`, `records` and what `counter`
needs; ANSWER gets the package's `version`, and as `tokens` a number for each record, or a text that says why it is not
taken.
"""

import atexit
import gc
import json
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

_OBJECTS_BETWEEN_COLLECTIONS = 500_000


def main() -> None:
    # Collections while the trainer is imported, and the last one before the exit, find nothing.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)
    script, request, answer = sys.argv[1:]
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    count = runpy.run_path(script)["counter"](asked)
    tokens = [_tokens(count, record) for record in asked["records"]]
    found = {"version": version(asked["package"]), "tokens": tokens}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


def _tokens(count: Callable[[dict[str, Any]], int], record: dict[str, Any]) -> int | str:
    try:
        return count(record)
    except Exception as error:  # trainers raise what they like
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
