"""Times, bytes and first proposals stay those of the version before, in every dimension of layouts."""

import json

import pytest

from tests.values.golden_predictions import FILE, WORKLOADS, decoded
from tests.values.parameters import parameters

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize(
    "name",
    parameters({name: name for name in WORKLOADS}, short=("whole, 8 devices on 2 nodes",)),
)
def test_predictions_and_proposals_are_those_of_the_version_before(name: str) -> None:
    then = GOLDEN[name]
    now = WORKLOADS[name].predicted(list(map(decoded, then["documents"].values())))
    assert now["layouts"] == then["layouts"]
    for (layout, seconds), expected in zip(now["proposals"], then["proposals"], strict=True):
        assert [layout, seconds] == [expected[0], pytest.approx(expected[1], rel=1e-12)]
    assert now["plans"].keys() == then["plans"].keys()
    for plan, predicted in now["plans"].items():
        before = then["plans"][plan]
        assert predicted["steps"] == pytest.approx(before["steps"], rel=1e-12)
        assert predicted["slower"] == pytest.approx(before["slower"], rel=1e-12)
        for one, other in zip(predicted["bytes"], before["bytes"], strict=True):
            assert one == pytest.approx(other, rel=1e-12)
