"""The resources of a command on a job: the prepared job, its database, and exclusive use of the devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.architecture import check_architecture
from autotune.events import Listener, Note, Phase, PhaseBegan, unheard
from autotune.folders import architectures_folder, lengths_folder, spool_folder, work_folder
from autotune.machine.agent import Agent
from autotune.machine.device_problems import check_devices
from autotune.machine.devices import device_names, locked, make_folder, resource
from autotune.machine.node import node_facts
from autotune.workload import Prepared, look_at, read_data
from storage.reading import read_store
from storage.spool import Spool
from storage.store import Store, open_store
from trials import plugins
from trials.job import Job
from trials.model.refusals.compiling import check_compiler
from trials.sites import SITES, Place, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """A prepared job, its store, the agent of this process, the site of its ranks, and a folder for their files."""

    prepared: Prepared
    store: Store
    agent: Agent
    site: Site
    folder: Path

    @property
    def spool(self) -> Spool:
        """Results that wait for this database."""
        return Spool(spool_folder(self.folder))


@contextmanager
def workbench(
    job: Job,
    database_url: str | None,
    listener: Listener = unheard,
    *,
    starts_ranks: bool = True,
    creates_database: bool = True,
) -> Iterator[Workbench]:
    """Describe the model, check and lease the devices, open the database and read the data, in this order.

    So a job that names a wrong file leaves no database behind, and a database error is reported before the data is
    read. Unless it `creates_database`, one that is not there is treated as `read_store` says. Without ranks to start,
    devices are leased only where their free memory decides the memory limit.
    Raise DeviceBusy when another agent measures or trains on these devices: the times of both would be wrong.
    Raise HardwareError for devices on which no rank can run, and NoCompiler where layers cannot be compiled.
    """
    folder = work_folder(database_url)
    outline = look_at(job)
    check_devices(outline.hardware, job.search.parallel, job.hardware.memory_limit)
    if job.training.compile:
        check_compiler(outline.hardware.accelerator)
    check_architecture(job.model, outline.shape.config_digest, architectures_folder(), listener)
    is_limit_found = outline.hardware.accelerator != "cpu" and job.hardware.memory_limit is None
    names = device_names(outline.hardware, job.search.parallel) if starts_ranks or is_limit_found else ()
    module, show = plugins.load(SITES, job.hardware.launcher), lambda text: listener(Note(text=text))
    place = Place(
        settings=job.hardware,
        hardware=outline.hardware,
        groups=job.search.parallel,
        folder=folder / "nodes",
        facts=node_facts,
        show=show,
    )
    make_folder(folder)
    with (
        locked(names),
        open_store(database_url) if creates_database else read_store(database_url) as store,
        Agent(store) as agent,
        module.open_site(place) as site,
    ):
        agent.take([resource(name) for name in names])
        listener(PhaseBegan(phase=Phase.LENGTHS, text="Reading the data"))
        prepared = read_data(job, outline, folder, listener, cache=lengths_folder())
        yield Workbench(prepared=prepared, store=store, agent=agent, site=site, folder=folder)
