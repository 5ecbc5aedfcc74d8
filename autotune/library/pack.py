"""Packs without training."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from autotune.database_setting import chosen_database
from autotune.errors import PackError
from autotune.events import Listener, unheard
from autotune.job_file import JobFile, JobLike, as_job
from autotune.library.values import check_whole, text_of
from autotune.packing.balance import Balanced, balanced
from autotune.packing.material import PackOptions, job_material, read_material
from autotune.packing.packs_file import check_pack_file, write_packs
from trials.data.packs import Oversize

if TYPE_CHECKING:
    from autotune.forecast.what_if import WhatIf


def pack(
    data: JobLike,
    *,
    qv: int | None = None,
    qt: int | None = None,
    qv_min: int | None = None,
    qt_min: int | None = None,
    packer: str | None = None,
    data_parallel: int | None = None,
    global_batch: int | None = None,
    seed: int | None = None,
    epoch: int = 0,
    oversize: Oversize | None = None,
    model: str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Balanced:
    """Pack the data of a job, or a file of lengths, and measure the balance before and after; needs no device.

    The options are those of the command. `out` is a file for the packs, .jsonl or .parquet, which replaces older
    ones. Raise PackError for options and files that cannot be used.
    """
    check_whole(PackError, qv=(qv, 0), qt=(qt, 1), qv_min=(qv_min, 0), qt_min=(qt_min, 0), seed=(seed, 0))
    check_whole(PackError, data_parallel=(data_parallel, 1), global_batch=(global_batch, 1), epoch=(epoch, 0))
    if oversize not in (None, *get_args(Oversize)):
        raise PackError(f"oversize is one of {', '.join(get_args(Oversize))}, not {oversize!r}")
    wanted = PackOptions(
        qv=qv,
        qt=qt,
        qv_min=qv_min,
        qt_min=qt_min,
        packer=None if packer is None else text_of(PackError, "packer", packer),
        data_parallel=data_parallel,
        global_batch_samples=global_batch,
        seed=seed,
        epoch=epoch,
        oversize=oversize,
        model=None if model is None else text_of(PackError, "model", model),
    )
    target = None if out is None else Path(text_of(PackError, "out", out))
    if target:
        check_pack_file(target)
    if isinstance(data, str | os.PathLike):
        material = read_material(JobFile(path=Path(data)), wanted)
    else:
        material = job_material(as_job(data), Path("job"), wanted)
    found = balanced(material, wanted)
    if target:
        write_packs(target, found.after.epoch)
    return found


def what_if(
    job: JobLike,
    *several: Mapping[str, float] | str,
    database: str | None = None,
    listener: Listener = unheard,
) -> "WhatIf":
    """Compare the data of a job as it is with the same under each of `several` settings.

    Settings are a mapping such as `{"max_pixels": 602112, "cutoff": 4096}`, or the text of the command's `--what-if`.
    Times and memory of the best plans are forecast where the database has a profile of the job's devices. Raise
    PackError for a setting that the model's processors do not have, or that changes nothing.
    """
    # These import torch, which packing a file of lengths does not need.
    from autotune.forecast.model_settings import checked_settings  # noqa: PLC0415
    from autotune.forecast.what_if import what_if  # noqa: PLC0415

    settings = [checked_settings(each) for each in several]
    path = Path(job) if isinstance(job, str | os.PathLike) else Path("job")
    of_job = as_job(job)
    url = chosen_database(database, of_job.database)
    return what_if(of_job, path, settings, database_url=url, listener=listener)
