"""The devices that a job gets, on one machine or several."""

import logging
import os
from dataclasses import replace

from autotune.errors import JobError
from autotune.machine.devices import any_in_use, device_names, locked
from autotune.machine.hardware import probe_hardware
from trials import plugins
from trials.job import Job
from trials.machine.control_groups import usable_cores
from trials.sites import SITES
from trials.units import number_of
from trials.workload import Hardware

_log = logging.getLogger(__name__)


def hardware_of(job: Job) -> Hardware:
    """Describe the devices of the job: those of this machine, times the number of its nodes, which are alike.

    Warn when CPU ranks outnumber the cores. Raise what `probe_hardware` raises, JobError for ranks that cannot be equal
    on the nodes, UnknownName for a launcher that does not exist, and SiteError for settings that it cannot use.
    """
    shape = plugins.load(SITES, job.hardware.launcher).shape(job.hardware, os.environ)
    nodes, most = shape.nodes, shape.of_node
    wanted = job.hardware.devices or (most and nodes * most)
    if wanted is not None and wanted % nodes:
        raise JobError(f"hardware.devices: {wanted} ranks cannot be equal on {nodes} nodes; give a multiple of {nodes}")
    if wanted and most and wanted > nodes * most:
        raise JobError(
            f"hardware.devices: {wanted} ranks are more than {nodes} nodes with {most} slots each have; lower it"
        )
    groups = job.search.parallel
    here = probe_hardware(wanted and wanted // nodes, groups)
    if here.accelerator == "cpu" and here.devices * groups > (cores := usable_cores()):
        _log.warning(
            "%d ranks share %s, so measured times are unreliable; %s",
            here.devices * groups,
            number_of(cores, "CPU core"),
            f"set hardware.devices to {nodes * max(1, cores // groups)} or less"
            + (", or lower search.parallel" if groups > 1 else ""),
        )
    return replace(here, devices=nodes * here.devices, nodes=nodes)


def check_free(job: Job) -> None:
    """Raise DeviceBusy where another process uses the devices of the job, and what `hardware_of` raises.

    While no device is in use nothing is probed, so that a warning of the probe comes once.
    """
    if any_in_use():
        with locked(device_names(hardware_of(job), job.search.parallel)):
            pass
