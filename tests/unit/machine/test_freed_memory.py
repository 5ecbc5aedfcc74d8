"""Memory that a process keeps for its next allocation, by its page faults, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trials.channels.folder import FolderChannel
from trials.machine.freed_memory import return_freed_memory
from trials.run import serving

_PROGRAM = """
import psutil, resource, torch
from trials.machine.freed_memory import keep_freed_memory, return_freed_memory

def passed():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(1 << 20) for _ in range(64)] + [torch.ones(64 << 10) for _ in range(100)]
    del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if {keeps}:
    keep_freed_memory()
passed()
# Gaps of what was freed may be too small for the next pass, or the one after it.
again, held = min(passed() for _ in range(6)), psutil.Process().memory_info().rss
return_freed_memory()
print(again, (held - psutil.Process().memory_info().rss) >> 20)
"""
_PAGES = (64 * (4 << 20) + 100 * (256 << 10)) // (4 << 10)
"""Of what a pass allocates and frees, 281 MiB."""


def faults_and_returned(*, keeps: bool) -> tuple[int, int]:
    """Return (least page faults of a pass after the first, MiB that are returned in the end)."""
    program = _PROGRAM.format(keeps=keeps)
    # Without it the C library adapts the threshold, from 128 KiB on, to what was freed before.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    faults, returned = map(int, output.split())
    return faults, returned


def test_memory_that_is_kept_is_not_cleared_again_and_is_returned_when_asked() -> None:
    faults, returned = faults_and_returned(keeps=True)
    assert faults < _PAGES / 50
    assert returned > 260


@pytest.mark.long
def test_without_keeping_it_the_system_clears_it_again() -> None:
    faults, _ = faults_and_returned(keeps=False)
    assert faults > _PAGES / 2


def test_what_torch_keeps_of_a_device_and_in_page_locked_memory_is_returned_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returned: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append("device"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: returned.append("host"), raising=False)
    return_freed_memory()
    assert returned == ["device", "host"]


def test_a_rank_keeps_it_from_the_first_request_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr(serving, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setenv("RANK", "0")
    assert not serving.serve(FolderChannel(tmp_path))  # there is no request
    assert kept
