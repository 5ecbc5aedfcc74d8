"""TensorBoard: event files in the folder `tensorboard` of the output."""

import json
from collections.abc import Mapping
from textwrap import indent

from torch.utils.tensorboard import SummaryWriter

from autotune.loggers import LoggedRun, RunLog

ERRORS = (OSError,)
# A choice: TensorBoard's default of 120 s would hide the first steps of a short training for two minutes.
_FLUSH_SECONDS = 10


def start(run: LoggedRun) -> RunLog:
    return _Events(run)


class _Events:
    def __init__(self, run: LoggedRun) -> None:
        # TensorBoard hides what earlier launches wrote of steps that are run again.
        self._writer = SummaryWriter(
            str(run.output / "tensorboard"), purge_step=run.done + 1, flush_secs=_FLUSH_SECONDS
        )
        # TensorBoard reads text as Markdown, in which four spaces begin a block of code.
        self._writer.add_text("config", indent(json.dumps(run.config, indent=2), "    "), run.done)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, _failed: bool, /) -> None:
        self._writer.close()
