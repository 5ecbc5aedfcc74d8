"""The command `profile`, which times each kind of layer."""

from pathlib import Path

from autotune import output_file
from autotune.cli.context import Options
from autotune.events import start_events
from autotune.forecast.profile_file import stored_costs
from autotune.job_file import JobFile
from autotune.prediction.costs_table import TypicalPack, costs_document, costs_text
from autotune.search.compiling import decided
from autotune.search.execution.profiling import layer_costs
from autotune.workbench import workbench
from trials import wire
from trials.run.pool import WarmPool


def profile_job(options: Options, file: JobFile, *, out: Path | None, fresh: bool) -> None:
    if out:
        output_file.check_output_file(out, (".json",))
        output_file.check_no_input(out, (file.path,))
    job = file.job
    listener = options.display
    with workbench(job, options.database_url(job.database), listener) as opened:
        bench = decided(opened, listener)
        work, logs = bench.prepared.workload, bench.folder / "ranks" / "profile"
        bench.store.add_workload(work)
        launcher = bench.site.launcher(logs, work.hardware.devices)
        with WarmPool(launcher, on_start=start_events(listener)) as pool:
            costs = layer_costs(bench.prepared, bench.store, pool, logs, listener, fresh=fresh)
        stored = bench.store.layer_profile(work.hardware.fingerprint, work.model.fingerprint, work.software)
    assert stored is not None, "`layer_costs` stores the profile that it returns"
    if out:
        with output_file.whole(out) as partial:
            partial.write_text(wire.encode(stored_costs(stored)))
        options.display.show(f"Wrote the costs to {out}")
    pack = TypicalPack.of(work.data)
    options.give(lambda: {**costs_document(costs, pack), "file": out and str(out)}, lambda: costs_text(costs, pack))
