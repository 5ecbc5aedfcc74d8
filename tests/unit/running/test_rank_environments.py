import os

import pytest

from trials.launchers.commands import rank_environments


def test_groups_have_devices_and_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = [each for group in range(2) for each in rank_environments(2, "cuda", group=group, groups=2)]
    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "2", "3"]
    assert [each["RANK"] for each in found] == ["0", "1", "0", "1"]
    assert {each["OMP_NUM_THREADS"] for each in found} == {"2"}
