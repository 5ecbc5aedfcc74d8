"""Released revisions depend on nothing that later versions change."""

import ast
from pathlib import Path

import pytest

from storage.migrations import versions

REVISIONS = sorted(Path(versions.__path__[0]).glob("r*.py"))


@pytest.mark.parametrize("revision", REVISIONS, ids=lambda path: path.stem)
def test_a_revision_imports_nothing_of_this_project(revision: Path) -> None:
    tree = ast.parse(revision.read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    packages = {str(name).partition(".")[0] for name in imported}
    assert not packages & {"autotune", "storage", "trials", "None"}, "a change there would change the revision"
