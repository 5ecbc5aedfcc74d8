"""Detection of leaking ranks."""

from dataclasses import replace

import pytest

from trials.tasks.footprint import Footprint, leaks

BEFORE = Footprint(descriptors=30, threads=20, resident_bytes=1 << 30, device_bytes=1 << 20)


@pytest.mark.parametrize(
    ("grown", "is_leak"),
    [
        ({"descriptors": 30 + 40}, False),
        ({"descriptors": 30 + 41}, True),
        ({"threads": 20 + 30}, False),
        ({"threads": 20 + 31}, True),
        ({"resident_bytes": 9 << 30}, False),
        ({"device_bytes": 200 << 20}, False),
        ({"device_bytes": 300 << 20}, True),
    ],
)
def test_a_rank_leaks_that_holds_more_than_plans_differ_by(grown: dict[str, int], is_leak: bool) -> None:
    after = replace(BEFORE, **grown)
    assert leaks((BEFORE, BEFORE), (BEFORE, after)) == ({1: (BEFORE, after)} if is_leak else {})
