"""Jobs on generated data, with a model of any size."""

from pathlib import Path

from autotune.workload import Prepared, prepare
from benchmarks.devices.target import Target
from trials.job import Job


def job_of(example: Path, model: Path, target: Target, devices: int, dtype: str) -> Job:
    """Return a job of the model on the example's data."""
    return Job.model_validate(
        {
            "model": {"path": str(model), "weights": "random", "dtype": dtype},
            "data": {"sources": [{"path": str(example / "data" / "train.jsonl")}]},
            "hardware": {"devices": devices} | ({"memory_limit": "2GiB"} if target.pretended else {}),
            "training": {
                "global_batch_samples": target.batch,
                "output": str(example / f"trained-{model.name}-{devices}"),
                "max_steps": 8,
            },
            "search": {"trials": target.trials, "time_limit": target.time_limit, "timed_steps": target.timed_steps},
        }
    )


def prepared_of(example: Path, model: Path, target: Target, devices: int, dtype: str) -> Prepared:
    """Return the prepared job."""
    job = job_of(example, model, target, devices, dtype)
    return prepare(job, example / f"work-{model.name}-{devices}-{dtype}")
