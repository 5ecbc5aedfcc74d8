"""`tune --for TRAINER` finds a plan that `export --to TRAINER` writes as it is."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from tests.programs.tuning_user import User

pytestmark = [pytest.mark.ranks, pytest.mark.long]


@pytest.mark.parametrize(("trainer", "dtype"), [("ms-swift", "bfloat16"), ("llama-factory", "float32")])
def test_the_winner_is_exported_as_it_was_measured(
    shallow: Path, tmp_path: Path, give_profile: Callable[..., None], trainer: str, dtype: str
) -> None:
    user = User(shallow, tmp_path, trials=4, final_steps=0)
    give_profile(user.url, example=shallow)
    job = (str(user.job), "--set", f"model.dtype={dtype}")
    best, said = user.run("tune", *job, "--for", trainer)
    assert f"plans are tried that {'LLaMA-Factory' if trainer == 'llama-factory' else trainer} can hold" in said
    assert best["plan"]["layout"]["pipeline"] == 1
    assert {each["role"] for each in best["baselines"]} >= {"default"}
    out = str(tmp_path / "exported")
    document, _ = user.run("export", *job, "--to", trainer, "--out", out)
    assert (document["plan_id"], document["wanted_id"], document["missing"]) == (best["id"], best["id"], [])
    assert set(document["price"]["parts"].values()) == {1.0}
    assert document["price"]["over_wanted"] == 1
    (settings,) = user.rows("SELECT settings FROM autotune_study")
    assert f'"trainer":"{trainer}"' in settings[0].replace(" ", "")
    page = tmp_path / "report.html"
    user.run("report", "--out", str(page))
    assert f"--fresh --for {trainer}" in page.read_text()
    with user.environment():
        shown = CliRunner().invoke(main, ["show", best["id"]]).stdout
    assert f"UTC for {trainer} with torch" in " ".join(shown.split())
    again, output = user.run("tune", *job, "--for", trainer)
    assert (again["id"], "trial" in output) == (best["id"], False)
