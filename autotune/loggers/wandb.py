"""Weights & Biases. Its environment variables, such as WANDB_PROJECT and WANDB_MODE, work as usual."""

import os
from collections.abc import Mapping
from typing import Any

import wandb

from autotune.errors import JobError
from autotune.loggers import LoggedRun, RunLog

ERRORS = (wandb.errors.Error, OSError, EOFError, RuntimeError)
# A choice: logged scalars upload in seconds, and devices of a cluster shall not wait for a lost network.
_FINISH_SECONDS = 300.0
"""Most time to wait for uploads at the end; the rest stays in its folder, for `wandb sync`."""


def start(run: LoggedRun) -> RunLog:
    return _WandbRun(run)


class _WandbRun:
    def __init__(self, run: LoggedRun) -> None:
        # Where the folder is missing, earlier launches have logged elsewhere: all steps are new to wandb.
        is_known = (run.output / "wandb").exists()
        self._logged = run.logged if is_known else frozenset()
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "autotune"),
                name=os.environ.get("WANDB_NAME", run.output.name),
                id=run.id,
                resume="allow",
                dir=run.output,
                config=run.config,
                settings=wandb.Settings(console="off", finish_timeout=_FINISH_SECONDS, finish_timeout_raises=True),
            )
        except wandb.errors.UsageError as error:
            raise JobError(
                f"training.loggers: wandb: {error}; run `wandb login`, set WANDB_MODE=offline, or remove it"
            ) from error
        # Its own steps can only rise, but steps of a resumed training begin again at the checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        new = {name: value for name, value in values.items() if (name, step) not in self._logged}
        if new:
            self._run.log({"step": step, **new})

    def close(self, failed: bool, /) -> None:
        self._run.finish(exit_code=int(failed))
