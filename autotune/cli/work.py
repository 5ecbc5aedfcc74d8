"""The commands that use the devices: profile, tune, launch and run."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from autotune import output_file
from autotune.certification.certificate import Certificate
from autotune.certification.certificate_report import certificate_text
from autotune.cli.context import NotedSignal, Options, Terminated, first_signal_noted
from autotune.cli.visible import visible
from autotune.data_problems import warn_of_skipped
from autotune.errors import JobError
from autotune.events import start_events
from autotune.exporting.checks import check_trainer
from autotune.folders import work_folder
from autotune.forecast.profile_file import PROFILE_MARK, stored_costs
from autotune.job_file import JobFile, with_values
from autotune.library.benches import training_bench
from autotune.library.launch import bench_with_plan, certificate_to_train
from autotune.library.tune import tuned
from autotune.plan_check import check_first_steps, check_plan, check_steps
from autotune.plan_choice import Keeps, check_new, trusted, unasked
from autotune.prediction.costs_table import TypicalPack, costs_document, costs_text
from autotune.results import study_report
from autotune.results.evidence import trials_behind
from autotune.results.known_plan import KnownPlan
from autotune.results.rival import Rival
from autotune.search.execution.profiling import layer_costs
from autotune.search.tuner import Tuner
from autotune.training.full_training import Launched
from autotune.training.launched_report import launched_document, launched_text, stopped_text
from autotune.training.plan_change import check_begun, plan_of_training, why_kept
from autotune.training.retuning import certified, check_checkpoints
from autotune.training.training_output import check_output
from autotune.training.watched_training import TrainingOptions, WatchedTraining
from autotune.workbench import Workbench, workbench
from trials import wire
from trials.channels.folder import FolderChannel
from trials.job import Job
from trials.plan import Plan
from trials.run.pool import WarmPool
from trials.sites import slurm
from trials.tasks.request import Training, write_request
from trials.tasks.training.output import RECORD_FILE, check_settings, read_record
from trials.tasks.training.settings import training_settings

_SUBMIT = "--submit"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of `launch`."""

    plan: str | None
    """Id or file of the plan to train with; the winner when absent."""
    resume_with: str | None
    """Id or file of the plan with which to continue a training of another plan."""
    steps: int | None
    """Total steps after which to stop."""
    dry_run: bool
    certify: bool
    retune_on_drift: bool
    launcher: str | None
    """The tool that starts the ranks; that of the job when absent."""
    submit: bool
    """Whether to submit the command to Slurm instead."""


def profile_job(options: Options, file: JobFile, *, out: Path | None, fresh: bool) -> None:
    if out:
        output_file.check_output_file(out, (".json",), PROFILE_MARK)
    job = file.job
    listener = options.display
    with workbench(job, options.database_url(job.database), listener) as bench:
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


def tune_job(
    options: Options,
    file: JobFile,
    *,
    launcher: str | None,
    submit: bool,
    trials: int | None,
    time_limit: str | None,
    trainer: str | None,
    fresh: bool,
) -> None:
    if trainer is not None:
        check_trainer("--for", trainer)
    job = with_values(file.job, "search", {"trials": trials, "time_limit": time_limit})
    job = with_values(job, "hardware", {"launcher": launcher})
    if submit:
        _submit(options, job)
        return
    found = tuned(job, options.database_url(job.database), options.display, fresh=fresh, trainer=trainer)
    best, certificate, ran = found.best, found.certificate, found.trials
    options.give(
        lambda: {**study_report.best_document(best, ran), "certificate": wire.to_document(certificate)},
        lambda: f"{study_report.best_text(best, ran)}\n\n{certificate_text(certificate)}",
    )


def launch_job(options: Options, file: JobFile, wanted: LaunchOptions) -> None:
    if wanted.dry_run and (wanted.certify or wanted.retune_on_drift or wanted.submit):
        raise click.UsageError(
            "--dry-run prints commands that neither certify nor tune again, and submits nothing; "
            f"remove --certify, --retune-on-drift and {_SUBMIT}"
        )
    job = with_values(file.job, "hardware", {"launcher": wanted.launcher})
    if wanted.retune_on_drift:
        check_checkpoints(job)
    if wanted.submit:
        _submit(options, job)
        return
    url, plan = options.database_url(job.database), wanted.resume_with or wanted.plan
    with bench_with_plan(
        job,
        url,
        plan,
        options.display,
        asking(options),
        retunes=wanted.retune_on_drift,
        starts_ranks=not wanted.dry_run,
    ) as (bench, chosen):
        certificate = certificate_to_train(bench, chosen.plan, options.display, certifies=wanted.certify)
        if wanted.dry_run:
            _give_commands(options, bench, chosen.plan, wanted.steps)
            return
        how = TrainingOptions(
            max_steps=wanted.steps, changes_plan=wanted.resume_with is not None, retunes=wanted.retune_on_drift
        )
        last, launched = _launch(options, bench, chosen, certificate, how)
        cores = _cores(bench)
    options.give(lambda: launched_document(last, launched), lambda: launched_text(last, launched, *cores))


def _cores(bench: Workbench) -> tuple[int, int]:
    """Return the loading processes of a rank, and the cores that they may use."""
    return bench.prepared.job.data.workers or 0, bench.prepared.workload.hardware.spare_cores()


def run_job(options: Options, file: JobFile, *, retune_on_drift: bool, launcher: str | None, submit: bool) -> None:
    job = with_values(file.job, "hardware", {"launcher": launcher})
    if retune_on_drift:
        check_checkpoints(job)
    if submit:
        _submit(options, job)
        return
    with training_bench(job, options.database_url(job.database), options.display) as bench:
        check_begun(bench.prepared)
        best, keeps = bench.store.last_winner(bench.prepared.workload.fingerprint), asking(options)
        if best is None:
            check_new(bench.store, bench.prepared.workload, job.training.output)
            best = Tuner(bench, options.display).tune(fresh=False)
            keeps = unasked  # the user may have left during the search
        ran = trials_behind(best, bench.store)
        how = TrainingOptions(retunes=retune_on_drift)
        chosen = trusted(bench.store, best, options.display, job.training.output, keeps)
        if not retune_on_drift:
            chosen = plan_of_training(bench, chosen, options.display)
        record = read_record(job.training.output / RECORD_FILE)
        if chosen.plan == best.plan and (record is None or why_kept(record, best.plan) is None):
            options.give_early(lambda: f"\n{study_report.best_text(best, ran)}\n")
        certificate = certified(bench, chosen.plan, options.display, takes_known=True)
        chosen, launched = _launch(options, bench, chosen, certificate, how)
        cores = _cores(bench)
    options.give(
        lambda: {"best": study_report.best_document(best, ran), "launch": launched_document(chosen, launched)},
        lambda: launched_text(chosen, launched, *cores),
    )


def _submit(options: Options, job: Job) -> None:
    """Submit this command as a job of Slurm. Raise JobError without the number of nodes."""
    if job.hardware.launcher != "slurm" or job.hardware.nodes is None:
        raise JobError(f"{_SUBMIT} needs hardware.launcher: slurm and hardware.nodes; add them")
    arguments = [each for each in sys.argv[1:] if each != _SUBMIT]
    folder = work_folder(options.database_url(job.database)) / "submitted"
    done = slurm.submit((sys.executable, "-P", "-m", "autotune", *arguments), job.hardware.nodes, folder)
    document = {"job": done.number, "script": str(done.script), "output": str(done.output)}
    options.give(
        lambda: document,
        lambda: f"Submitted {done.script} as job {done.number}; its output will be in {done.output}",
    )


def asking(options: Options) -> Keeps:
    """Return the question whether to train with the winner; without a terminal, `unasked` answers it."""

    def keeps(rival: Rival) -> bool:
        kept = unasked(rival)
        if not sys.stdin.isatty():
            return kept
        options.display.close()
        click.echo(visible(f"The best plan is in doubt: {rival}"), err=True)
        question = f"Train with {rival.role} ({rival.plan_id}), in place of the best plan?"
        return not options.ask(question, default=not kept)

    return keeps


def _give_commands(options: Options, bench: Workbench, plan: Plan, steps: int | None) -> None:
    """Print the commands of the ranks, which read the request that is written for them."""
    prepared = bench.prepared
    check_plan(prepared, plan)
    warn_of_skipped(prepared.index, plan.packing, prepared.job.data.oversize, f"plan {plan.id}")
    check_first_steps(prepared, plan)
    output = prepared.job.training.output
    check_output(prepared.job)
    request = prepared.request(plan, Training(output=output, max_steps=steps))
    check_settings(output, training_settings(request, prepared.index))
    check_steps(prepared, plan)
    # The next dry run must not replace the request that printed commands will read.
    folder = bench.folder / "launch" / f"dry-run-{wire.digest(request)}"
    write_request(FolderChannel(folder), request)
    commands = bench.site.commands(plan.layout.world_size, folder)
    document = {"commands": [{"argv": list(c.argv), "environment": dict(c.environment)} for c in commands]}
    options.give(lambda: document, lambda: "\n".join(command.shell() for command in commands), is_code=True)


def _launch(
    options: Options, bench: Workbench, chosen: KnownPlan, certificate: Certificate | None, how: TrainingOptions
) -> tuple[KnownPlan, Launched]:
    """Train with the plan, whose certificate holds; return the last plan, too."""
    if certificate is not None:
        options.display.show(certificate_text(certificate))
    noted: list[NotedSignal] = []

    @contextmanager
    def stopping() -> Iterator[Callable[[], bool]]:
        """Note the first signal of each launch; in a search between two, it ends the command at once."""
        with first_signal_noted() as first:
            noted.append(first)
            yield lambda: first.stops(options.display.show)

    training = WatchedTraining(
        bench=bench,
        chosen=chosen,
        certificate=certificate,
        options=how,
        listener=options.display,
        stopping=stopping,
    )
    launched = training.run()
    if launched.report.stopped:
        ending = stopped_text(launched.report, how.max_steps)
        raise Terminated(noted[-1].number or signal.SIGTERM, ending)  # a rank alone may have got a SIGTERM
    return training.chosen, launched
