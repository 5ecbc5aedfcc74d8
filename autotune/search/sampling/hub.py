"""Samplers of OptunaHub: classes of packages that are loaded by name, from its registry or from a folder."""

import importlib.util
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from optuna.exceptions import OptunaError
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from sqlalchemy.exc import SQLAlchemyError
from typing_extensions import override

from autotune.errors import JobError
from autotune.search.sampling.context import Distributions, Nearest, SamplerContext
from autotune.search.space.space import Space
from trials.units import number_of

HUB = "hub:"
"""Beginning of the name of a sampler of OptunaHub."""
_NAME = re.compile(rf"{HUB}(?P<package>\w+)(:(?P<kind>\w+))?(@(?P<folder>.+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSampler:
    """A class of samplers of OptunaHub, as a `SamplerModule`."""

    name: str
    """As `search.sampler` has it."""
    kind: type[BaseSampler]

    def sampler(self, context: SamplerContext) -> BaseSampler:
        """Return a sampler of points of `context.space`, with its seed where the class takes one. Raise JobError."""
        return _OfHub(self.built(context.seed), context.space, self.name)

    def built(self, seed: int) -> BaseSampler:
        """Return a sampler as its package has it. Raise JobError where the class needs other arguments."""
        with _blaming(self.name, "cannot be made", "name a sampler that needs no arguments"):
            arguments = inspect.signature(self.kind).parameters.values()
            takes_seed = any(each.name == "seed" or each.kind is each.VAR_KEYWORD for each in arguments)
            return self.kind(**{"seed": seed} if takes_seed else {})


def hub_sampler(name: str) -> HubSampler:
    """Return the class that `hub:PACKAGE` or `hub:PACKAGE:CLASS` names, each also with a registry as `@FOLDER`.

    Raise JobError where there is no such class, and where it cannot be loaded.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise JobError(
            f"search.sampler: {name!r} names no package of OptunaHub; write {HUB}PACKAGE, such as {HUB}auto_sampler, "
            f"or {HUB}PACKAGE@FOLDER for a registry in a folder"
        )
    if importlib.util.find_spec("optunahub") is None:
        raise JobError(
            f"search.sampler: {name} needs a package that is not installed; install it with `pip install optunahub`, "
            "or name another sampler"
        )
    kinds = _kinds(_loaded(name, found["package"], found["folder"]))
    chosen = [kind for each, kind in kinds.items() if found["kind"] in (None, each)]
    if len(chosen) != 1:
        remedy = f"name one as {HUB}PACKAGE:CLASS" if kinds else "name another package"
        raise JobError(
            f"search.sampler: {name} stands for {number_of(len(chosen), 'sampler')} of its package, which has "
            f"{', '.join(kinds) or 'none'}; {remedy}"
        )
    sampler = HubSampler(name=name, kind=chosen[0])
    sampler.built(seed=0)
    return sampler


def _loaded(name: str, package: str, folder: str | None) -> ModuleType:
    path = f"samplers/{package}"
    remedy = f"check that {folder} has {path}/__init__.py, and that what it imports is installed"
    if folder is None:
        remedy = (
            "check its name on https://hub.optuna.org, that GitHub can be reached, and that what it imports is "
            f"installed; or write {name}@FOLDER for a folder with {path}"
        )
    with _blaming(name, "cannot be loaded", remedy):
        import optunahub  # noqa: PLC0415 - an extra

        if folder is None:
            return optunahub.load_module(path)
        return optunahub.load_local_module(path, registry_root=folder)


def _kinds(module: ModuleType) -> dict[str, type[BaseSampler]]:
    """Return the samplers that a package names in `__all__`, by name; without `__all__`, those that it defines."""
    named = getattr(module, "__all__", None)
    values = {name: getattr(module, name, None) for name in (vars(module) if named is None else named)}
    kinds = {name: each for name, each in values.items() if isinstance(each, type) and issubclass(each, BaseSampler)}
    return {name: kind for name, kind in kinds.items() if named or kind.__module__.startswith(module.__name__)}


@contextmanager
def _blaming(name: str, what: str, remedy: str) -> Iterator[None]:
    """Raise JobError for whatever the code of a package raises, but for errors of the database."""
    try:
        yield
    except (OptunaError, SQLAlchemyError):
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise JobError(f"search.sampler: {name} {what} ({text}); {remedy}") from error


class _OfHub(Nearest):
    """Sampler of the plans nearest to what a sampler of OptunaHub suggests, which names the one that fails."""

    def __init__(self, sampler: BaseSampler, space: Space, name: str) -> None:
        super().__init__(sampler, space)
        self._failing = name, "failed", "name another sampler; what was measured is kept"

    @override
    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        with _blaming(*self._failing):
            return super().sample_relative(study, trial, search_space)

    @override
    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        with _blaming(*self._failing):
            super().before_trial(study, trial)

    @override
    def after_trial(self, study: Study, trial: FrozenTrial, state: Any, values: Any) -> None:
        with _blaming(*self._failing):
            super().after_trial(study, trial, state, values)
