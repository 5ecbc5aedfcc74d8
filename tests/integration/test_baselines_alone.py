"""`tune` with a budget for the baselines alone gives the fastest of them, and says what it is."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.search.roles import BASELINES
from tests.programs.tuning_user import User

pytestmark = pytest.mark.ranks


@pytest.mark.long
def test_a_user_gets_the_fastest_baseline_and_is_told_so(
    shallow: Path, tmp_path: Path, give_profile: Callable[..., None]
) -> None:
    user = User(shallow, tmp_path, trials=1, final_steps=0, space={"layouts": ["p2-d1-z0"], "qv": [7], "qt": [400]})
    give_profile(user.url, example=shallow)
    found, said = user.run("tune", str(user.job))
    assert any(each["role"] in BASELINES and each["gain"] == pytest.approx(1) for each in found["baselines"])
    assert found["evidence"]["tried_plans"] == 0
    assert found["confidence"] is None
    assert "No plan of search.space completed; the best plan is the fastest of" in said
    with user.environment():
        shown = CliRunner().invoke(main, ["show", found["id"]]).stdout
    assert "Nothing was searched: the budget allowed the baselines alone" in " ".join(shown.split())
