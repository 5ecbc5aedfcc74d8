"""What a rank holds from the first step of a trial on."""

from pathlib import Path
from typing import Any

import pytest

from tests.values.training import plan_of, prepared_of
from trials.channels.folder import FolderChannel, file_rendezvous
from trials.data.epoch import Step
from trials.engine.group import process_group
from trials.engine.state import MOMENTS
from trials.tasks.request import Trial
from trials.tasks.session import Session, open_session
from trials.tasks.trial import run_trial


@pytest.mark.filterwarnings("ignore")  # DeepSpeed warns of what it does itself
def test_the_moments_of_the_optimizer_are_there_in_the_first_step(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the peak of a device would be that of the heaviest packs without the moments, and of others with them."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    held: list[int] = []
    run = Session.step

    def noted(session: Session, batches: Any, step: Step) -> float:
        state, model = session.engine.state, session.engine.stage.model
        held.append(sum(state.read(weight, moment).numel() for weight in model.parameters() for moment in MOMENTS))
        return run(session, batches, step)

    monkeypatch.setattr(Session, "step", noted)
    task = Trial(warmup_steps=(1,), timed_steps=(0,))
    request = prepared_of(shallow, tmp_path).request(plan_of("4+2"), task)
    with (
        process_group(0, 0, 1, file_rendezvous(tmp_path / "rendezvous")) as device,
        open_session(request, 0, device) as session,
    ):
        weights = sum(weight.numel() for weight in session.engine.stage.model.parameters())
        run_trial(session, task, FolderChannel(tmp_path))
    assert held == [2 * weights, 2 * weights]
