"""Every module of a plugin package offers what the Protocol of its kind says."""

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import click
import pytest

from autotune.cli import main
from autotune.draft.trainers import TRAINERS, Trainer
from autotune.search.sampling.context import SamplerModule
from autotune.search.sampling.proposals import SAMPLERS
from trials import plugins
from trials.data.containers import CONTAINERS, Container
from trials.data.formats import FORMATS, Format
from trials.data.mixtures import MIXTURES, MixtureKind
from trials.data.packers import PACKERS, Packer
from trials.errors import UnknownName
from trials.model.family import FAMILIES, Family, find_family, load_family
from trials.sites import SITES

KINDS: tuple[tuple[plugins.Plugins[Any], type], ...] = (
    (CONTAINERS, Container),
    (FAMILIES, Family),
    (FORMATS, Format),
    (MIXTURES, MixtureKind),
    (PACKERS, Packer),
    (SAMPLERS, SamplerModule),
    (TRAINERS, Trainer),
)
MODULES = {
    f"{kind.__name__} {name}": (cast(ModuleType, module), kind)
    for found, kind in KINDS
    for name, module in plugins.each(found)
}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_every_member_of_its_protocol_with_its_parameters(module: str) -> None:
    found, kind = MODULES[module]
    functions = {name: function for name, function in vars(kind).items() if inspect.isfunction(function)}
    public = {name: function for name, function in functions.items() if not name.startswith("_")}
    assert public
    for name in inspect.get_annotations(kind):
        assert hasattr(found, name)
    for name, function in public.items():
        # A Protocol's method takes `self`, a module's function does not, and may take more that need not be given.
        expected = [*inspect.signature(function).parameters][1:]
        parameters = inspect.signature(getattr(found, name)).parameters
        assert [*parameters][: len(expected)] == expected
        further = [*parameters.values()][len(expected) :]
        assert all(each.default is not inspect.Parameter.empty for each in further)


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UnknownName, match="'first-fit' is not one of the packers here: best-fit, cutting-stock, isf"):
        plugins.load(PACKERS, "first-fit")


def test_the_help_names_every_launcher() -> None:
    # It is written there: a list from the package would import pydantic for `--help`.
    (option,) = (each for each in main.commands["tune"].params if each.name == "launcher")
    assert isinstance(option, click.Option)
    listed = (option.help or "").partition(":")[2].partition(".")[0]
    assert {*re.findall(r"\w+", listed)} - {"or"} == {*plugins.names(SITES)}


def test_a_family_is_found_by_the_configurations_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        model_type = "native_size_vl"

    assert find_family(cast(Any, Config())) is None
    source = "OTHER_FORMS = {}\ndef takes(config):\n    return config.model_type == 'native_size_vl'\n"
    (tmp_path / "native_size.py").write_text(source)
    package = __import__(FAMILIES.package, fromlist=["__path__"])
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    found = find_family(cast(Any, Config()))
    assert found is not None
    assert found.OTHER_FORMS == {}
    assert load_family(cast(Any, Config())) is found
