"""Finds an implementation by name: a new file in the right package is all that a new one needs."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from trials.errors import UnknownName


def names(package: str) -> tuple[str, ...]:
    """Module names in `package`, sorted, with `-` for `_`, as the job file spells them."""
    found = importlib.import_module(package)
    return tuple(sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(found.__path__)))


def load(package: str, name: str) -> ModuleType:
    """The module of `package` that is called `name`. Raises UnknownName with the names that exist."""
    if name not in names(package):
        kind = package.rsplit(".", 1)[-1]
        raise UnknownName(f"{name!r} is not one of the {kind} here: {', '.join(names(package))}")
    return importlib.import_module(f"{package}.{name.replace('-', '_')}")


def each(package: str) -> Iterator[tuple[str, ModuleType]]:
    """Every (name, module) of `package`, sorted by name."""
    for name in names(package):
        yield name, load(package, name)
