"""Implementations that are found by name: adding one is adding a module to its package."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, cast

from trials.errors import UnknownName

Contract = TypeVar("Contract")


@dataclass(frozen=True, slots=True)
class Plugins(Generic[Contract]):
    """A package whose modules each implement the Protocol `Contract`, such as `Plugins[Packer]("trials.data.packers")`.

    Tests over all names check that the modules do; loading does not.
    """

    package: str
    kind: str = ""
    """What its modules are called in messages; by default as the package."""


def names(plugins: Plugins[Any]) -> tuple[str, ...]:
    """Return the names of the modules, sorted, with `-` for `_`, as the job file spells them."""
    return tuple(sorted(_paths(plugins)))


def load(plugins: Plugins[Contract], name: str) -> Contract:
    """Return the module of this name. Raise UnknownName with the names that exist."""
    paths = _paths(plugins)
    if name not in paths:
        kind = plugins.kind or plugins.package.rsplit(".", 1)[-1]
        raise UnknownName(f"{name!r} is not one of the {kind} here: {', '.join(sorted(paths))}")
    return cast(Contract, importlib.import_module(paths[name]))


def each(plugins: Plugins[Contract]) -> Iterator[tuple[str, Contract]]:
    """Yield (name, module), sorted by name."""
    for name in names(plugins):
        yield name, load(plugins, name)


def _paths(plugins: Plugins[Any]) -> dict[str, str]:
    """Return name -> path of each module, those in folders of the package included."""
    package = importlib.import_module(plugins.package)
    return _paths_in(tuple(package.__path__), f"{plugins.package}.")


@cache  # predictions load packers and dimensions ten thousands of times
def _paths_in(folders: tuple[str, ...], prefix: str) -> dict[str, str]:
    modules = pkgutil.walk_packages(folders, prefix)
    return {each.name.rpartition(".")[2].replace("_", "-"): each.name for each in modules if not each.ispkg}
