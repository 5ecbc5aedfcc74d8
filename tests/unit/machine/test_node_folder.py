"""The folder of a node is gone when the node has ended, or when the next one starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.machine.node import node_folder

NODE = """
import sys
from autotune.machine.node import node_folder
with node_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this process, and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_the_folder_of_a_killed_node_is_removed_and_that_of_a_working_one_is_kept(temporary: Path) -> None:
    nodes = [
        subprocess.Popen([sys.executable, "-c", NODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        folders = [Path(node.stdout.readline().strip()) for node in nodes if node.stdout]
        for folder in folders:
            (folder / "rank-0.log").touch()
        killed, works = nodes
        killed.kill()
        killed.wait()
        assert folders[0].exists()
        with node_folder() as own:
            assert own.parent == temporary
            assert {*temporary.iterdir()} == {folders[1], own}
            works.communicate()
        assert not any(temporary.iterdir())
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


def test_what_is_no_folder_of_a_node_stays(temporary: Path) -> None:
    (temporary / "kept").mkdir()
    (temporary / "kept" / "in-use.lock").touch()
    (temporary / "autotune-node-link").symlink_to(temporary / "kept")
    (temporary / "autotune-node-begins").mkdir()
    (temporary / "autotune-node-file").touch()
    with node_folder():
        pass
    assert {each.name for each in temporary.iterdir()} == {
        "kept",
        "autotune-node-link",
        "autotune-node-begins",
        "autotune-node-file",
    }
