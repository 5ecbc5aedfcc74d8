"""Tokens that ms-swift's own template makes of a record. Source: swift/arguments and swift/template of 4.6."""

import os
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any

_WHOLE: dict[str, Any] = {"max_length": None, "truncation_strategy": "delete"}


def counter(request: dict[str, Any]) -> Callable[[dict[str, Any]], int]:
    """Return what counts a record of the exported data under the exported `settings`, whatever its length."""
    settings: dict[str, Any] = request["settings"]
    # As its command does. Limits of images are read while the package is imported.
    for name, value in settings.get("ENV", {}).items():
        os.environ.setdefault(name, value)
    kind = import_module("swift.arguments.base_args.template_args").TemplateArguments
    names = {each.name for each in fields(kind)}
    arguments = kind(**({name: value for name, value in settings.items() if name in names} | _WHOLE))
    arguments.remove_unused_columns = True  # of other arguments, and of no effect on tokens
    processor = import_module("swift.model").get_processor(request["model"], model_type=settings.get("model_type"))
    template = import_module("swift.template").get_template(processor, **arguments.get_template_kwargs())
    template.set_mode("train")
    return lambda record: sum(template.encode(record, return_length=True)["lengths"])
