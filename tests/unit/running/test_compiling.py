"""What torch needs on a machine to compile layers."""

import importlib.util
import sysconfig
from pathlib import Path

import pytest

from trials.errors import InvalidPlan, NoCompiler
from trials.model.refusals.compiling import check_compilable, check_compiler, missing_tool
from trials.plan import Layout


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a C++ compiler and Python's headers."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "Python.h").touch()
    (tmp_path / "g++").touch(mode=0o755)


def test_a_machine_with_a_compiler_and_headers_lacks_nothing() -> None:
    assert missing_tool("cpu") is None
    check_compiler("cpu")


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    assert missing_tool("cpu") == "a compiler, and CXX=/nonexistent is none"
    monkeypatch.delenv("CXX")
    (tmp_path / "g++").unlink()
    with pytest.raises(NoCompiler, match=r"^training\.compile needs a compiler \(g\+\+\); install it, or remove "):
        check_compiler("cpu")


def test_headers_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "Python.h").unlink()
    assert missing_tool("cpu") == f"Python's headers, and there is no {tmp_path / 'Python.h'}"


def test_a_gpu_needs_triton_and_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert missing_tool("cuda") == "the package triton, which is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert missing_tool("cuda") == "a compiler (gcc or clang)"
    (tmp_path / "clang").touch(mode=0o755)
    assert missing_tool("cuda") is None


def test_layouts_whose_layers_exchange_or_offload_cannot_be_compiled() -> None:
    for layout in (Layout(pipeline=2, data=2, zero=1), Layout(pipeline=1, data=4, zero=2)):
        check_compilable(layout)
    with pytest.raises(InvalidPlan, match=r"ZeRO 3, whose hooks .*; use ZeRO 2, or remove training\.compile"):
        check_compilable(Layout(pipeline=1, data=4, zero=3))
    with pytest.raises(InvalidPlan, match=r"tensor degree 2, whose .*; use tensor 1, or remove training\.compile"):
        check_compilable(Layout(pipeline=2, data=1, tensor=2, zero=1))
    with pytest.raises(InvalidPlan, match=r"offload, whose .*; use offload none, or remove training\.compile"):
        check_compilable(Layout(pipeline=2, data=1, zero=1, offload="vision"))
