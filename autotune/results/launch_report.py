"""Full trainings as text: how they ended, and their speed next to the promised one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from autotune.results.text_table import table
from storage.launch_speed import LaunchWindow
from storage.records import LaunchRecord
from storage.validity import Change
from trials.units import number_of, speed_text
from trials.workload import Workload

# A choice: smaller losses come and go with other load, and each line should be worth a look.
_SLOW = 0.1
"""Share of the promised speed that a slow window lacks, at least."""
# A choice: the stretches that lost most time, on part of a screen.
_MOST_LINES = 8
# A choice: a line has room for these.
_MOST_CHANGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLaunch:
    """A training with a plan, next to the search that the plan is shown of."""

    launch: LaunchRecord
    workload: Workload
    """What it trained, and on which machine."""
    changes: tuple[Change, ...]
    """What differs from the workload of the search."""
    place: str | None
    """The process, while it runs."""


def launch_text(training: ShownLaunch) -> str:
    """Show one training. Of its windows, neighbours that are all slow, all not, or all unpromised, are one line."""
    return "\n".join((_end_text(training), *filter(None, (_windows_text(training.launch.windows),))))


def _end_text(training: ShownLaunch) -> str:
    launch, work = training.launch, training.workload
    started = f"Launched {launch.started:%Y-%m-%d %H:%M} UTC"
    if launch.imported_from is not None:
        started += f" elsewhere, imported from {launch.imported_from}"
    if training.changes:
        changes = "; ".join(map(str, training.changes[:_MOST_CHANGES]))
        started += f", on another workload: {work.model.name} on {work.hardware} ({changes})"
    if launch.result is None:
        return f"{started}: {f'running, {training.place}' if training.place else 'not finished'}"
    speed = launch.result.training_samples_per_second
    measured = f", {speed_text(speed)} samples/s" if speed is not None else ""
    expected = ""
    if (promised := _promised(launch.windows)) is not None:
        expected = f" (promised {speed_text(promised)} for samples of as many tokens)"
    elif launch.promised_samples_per_second is not None:
        expected = f" (promised {speed_text(launch.promised_samples_per_second)} for the samples of its search)"
    return f"{started}: {launch.result.status} after {number_of(launch.result.steps, 'step')}{measured}{expected}"


def _windows_text(windows: Sequence[LaunchWindow]) -> str:
    stretches = [list(some) for _, some in groupby(windows, _kind)]
    shown = sorted(sorted(stretches, key=_lost_time)[-_MOST_LINES:], key=lambda some: some[0].first_step)
    if not shown:
        return ""
    lines = [table(("steps", "samples/s", "promised", "change", "what grew most"), list(map(_row, shown)))]
    if rest := len(stretches) - len(shown):
        lines.append(
            f"{number_of(rest, 'stretch that lost less is', 'stretches that lost less are')} left out; --json has "
            "every window"
        )
    return "\n".join(lines)


def _kind(window: LaunchWindow) -> tuple[bool, bool]:
    """Return (whether it is slow, whether nothing was promised of it, as in a curriculum)."""
    return _is_slow(window), window.change is None


def _is_slow(window: LaunchWindow) -> bool:
    return window.parts.growth is not None or (window.change is not None and window.change < -_SLOW)


def _lost_time(stretch: Sequence[LaunchWindow]) -> float:
    """Return the time lost against the promise, in seconds divided by the samples of a step."""
    return sum(
        window.steps * (1 / window.training_samples_per_second - 1 / window.promised_samples_per_second)
        for window in stretch
        if window.promised_samples_per_second is not None
    )


def _row(stretch: Sequence[LaunchWindow]) -> tuple[str, ...]:
    speed = _speed([(window.steps, window.training_samples_per_second) for window in stretch])
    promised = _promised(stretch)
    worst = min(stretch, key=lambda window: window.tokens_per_second)
    return (
        f"{stretch[0].first_step}-{stretch[-1].last_step}",
        speed_text(speed),
        "" if promised is None else speed_text(promised),
        "" if promised is None else f"{speed / promised - 1:+.0%}",
        "" if worst.parts.growth is None else str(worst.parts.growth),
    )


def _promised(windows: Sequence[LaunchWindow]) -> float | None:
    """Return the promised speed for samples of as many tokens as those of all windows; None where there is none."""
    promises = [(window.steps, window.promised_samples_per_second) for window in windows]
    known = [(steps, promised) for steps, promised in promises if promised is not None]
    return _speed(known) if known and len(known) == len(promises) else None


def _speed(parts: Sequence[tuple[int, float]]) -> float:
    """Return the mean speed of (steps, samples/s) pairs. All steps are taken to have equally many samples."""
    return sum(steps for steps, _ in parts) / sum(steps / speed for steps, speed in parts)
