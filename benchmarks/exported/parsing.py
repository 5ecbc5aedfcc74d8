"""Reads an exported configuration by the trainer's own parser: `python parsing.py TRAINER CONFIGURATION`.

It runs in the environment of the trainer, inside of the exported folder, and imports nothing of autotune. Prints a JSON
object with settings of the configuration that were read otherwise, and raises what the parser raises.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    trainer, file = sys.argv[1:]
    written: dict[str, Any] = import_module("yaml").safe_load(Path(file).read_text(encoding="utf-8"))
    stdout, sys.stdout = sys.stdout, sys.stderr  # trainers print
    read, ignored = {"ms-swift": _ms_swift, "llama-factory": _llama_factory}[trainer](file)
    other = {name: [value, read.get(name)] for name, value in written.items() if _differ(value, read.get(name))}
    print(json.dumps({"ignored": ignored, "read": len(written), "otherwise": other}, default=str), file=stdout)


def _differ(value: Any, read: Any) -> bool:
    read = getattr(read, "value", read)  # of an enumeration
    if isinstance(value, str):
        parts = ",".join(map(str, read)) if isinstance(read, list) else str(read).removeprefix("torch.")
        return value != parts and not parts.startswith(f"{value}/")  # ms-swift adds a folder for each run
    return bool(read != value) and str(read) != str(value)


def _ms_swift(file: str) -> tuple[dict[str, Any], list[str]]:
    """Return its arguments, and those of the file that it does not know, as `swift sft FILE` finds them."""
    arguments = [file]
    import_module("swift.cli.main").parse_yaml_args(arguments)
    kind = import_module("swift.arguments").SftArguments
    read, unknown = import_module("swift.utils").parse_args(kind, arguments)
    return vars(read) | {
        "ENV": {name: os.environ[name] for name in ("MIN_PIXELS", "MAX_PIXELS") if name in os.environ}
    }, unknown


def _llama_factory(file: str) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of all its groups; it refuses those that it does not know."""
    settings = import_module("yaml").safe_load(Path(file).read_text(encoding="utf-8"))
    groups = import_module("llamafactory.hparams").get_train_args(settings)
    return {name: value for group in groups for name, value in vars(group).items()}, []


if __name__ == "__main__":
    main()
