"""State of a training for its display."""

from collections.abc import Sequence

from autotune.events import Event
from trials.tasks.training.progress import Evaluated, Progress
from trials.units import duration_text, number_of, speed_text

_SHOWN_STEPS = 12
"""Steps of a training that last as lines, about."""
_LATE_STEPS, _LATE_SECONDS = 3.0, 5.0
"""Times the mean duration of a step, and seconds, after which a step is late."""


class TrainingView:
    """Steps and evaluations of a training."""

    def __init__(self, last_step: int | None, best: Evaluated | None) -> None:
        """Stop after `last_step`, else at the end of the training; `best` is the best evaluation until now."""
        self._wanted = last_step
        self._last: Progress | None = None
        self._heard = 0.0
        """Time of the last step or evaluation."""
        self._evaluated: Evaluated | None = None
        self._best = best
        self._began = self._stepped = 0.0
        """Times of the first and of the last step."""
        # Of all steps but the first, which warms up.
        self._steps, self._samples = 0, 0
        self._seconds, self._waited_seconds = 0.0, 0.0

    @property
    def share(self) -> float | None:
        return None if self._last is None else self._last.step / self._end(self._last)

    def hear(self, event: Event, now: float) -> str:
        match event:
            case Progress():
                is_first, self._last, self._heard, self._stepped = self._last is None, event, now, now
                if is_first:
                    self._began = now
                else:
                    self._steps, self._samples = self._steps + 1, self._samples + event.samples
                    self._seconds += event.seconds
                    self._waited_seconds += event.data_wait_seconds
                # Loggers and progress.jsonl have every step; a log of the terminal should stay short.
                every = max(1, event.of // _SHOWN_STEPS)
                return _step_text(event) if is_first or event.step == event.of or event.step % every == 0 else ""
            case Evaluated():
                self._heard, self._evaluated = now, event
                if self._best is None or event.evaluation_loss < self._best.evaluation_loss:
                    self._best = event
                blank = f", {event.blank_samples} could not be read" if event.blank_samples else ""
                took = f"{number_of(event.samples, 'sample')} in {event.seconds:.1f} s{blank}"
                return f"  step {event.step}/{event.of}  evaluation loss {event.evaluation_loss:.3f}  {took}"
            case _:
                return ""

    def headline(self, now: float) -> str:
        last = self._last
        if last is None:
            return "no step yet"
        end = self._end(last)
        what = f"step {last.step} of {end}, loss {last.loss:.3f}"
        if not self._steps:
            return what
        mean, silent = self._seconds / self._steps, now - self._heard
        what += f", {speed_text(self._samples / self._seconds)} samples/s"
        if last.step == end:
            return f"{what}; writing the results"
        late = f"; no step for {duration_text(silent)}" if silent > max(_LATE_STEPS * mean, _LATE_SECONDS) else ""
        # With evaluations and checkpoints in between; steps that are read late, all at once, seem to take no time.
        pace = max(mean, (self._stepped - self._began) / self._steps)
        return f"{what}; about {duration_text(pace * (end - last.step))} left{late}"

    def rows(self, _: float) -> Sequence[tuple[str, str]]:
        rows = []
        if self._steps:
            rows.append(("data", f"waited for in {self._waited_seconds / self._seconds:.1%} of the time"))
        if self._evaluated and self._best:
            last, best = self._evaluated, self._best
            text = f"loss {last.evaluation_loss:.3f} after step {last.step}"
            rows.append(("held out", f"{text}, best {best.evaluation_loss:.3f} after step {best.step}"))
        return rows

    def _end(self, last: Progress) -> int:
        return min(last.of, self._wanted or last.of)


def _step_text(step: Progress) -> str:
    rate = "" if step.learning_rate is None else f"  learning rate {step.learning_rate:.2e}"
    speed = speed_text(step.samples / step.seconds)
    blank = f", {step.blank_samples} could not be read" if step.blank_samples else ""
    return f"  step {step.step}/{step.of}  loss {step.loss:.3f}{rate}  {speed} samples/s{blank}"
