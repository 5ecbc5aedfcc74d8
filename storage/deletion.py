"""What a deletion of studies removes, and the processes that use them."""

from dataclasses import dataclass

from storage.records import AgentRecord
from trials.units import number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A process that has not ended and works on a study, or trains with one of its plans."""

    agent: AgentRecord
    what: str
    """For messages: `searches in study NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What is deleted with some studies, as numbers of rows."""

    studies: tuple[str, ...]
    """Their names."""
    trials: int
    best_plans: int
    plans: int
    """Plans that no other study tried."""
    launches: int
    """Full trainings with these plans."""
    notes: int
    tags: int
    calibrations: int
    """Calibration states, from which searches on similar workloads start."""
    heirs: tuple[str, ...]
    """Names of later studies that may have used their results; these keep their winners."""
    uses: tuple[Use, ...]
    """Processes that prevent the deletion while they run."""

    def __str__(self) -> str:
        """Describe what is deleted with the studies, and the effect on other studies."""
        parts = (
            (self.trials, "trial", ""),
            (self.best_plans, "best plan", ""),
            (self.plans, "plan", " that no other study tried"),
            (self.launches, "record", " of trainings with these plans"),
            (self.notes, "note", ""),
            (self.tags, "tag", ""),
        )
        counts = ", ".join(f"{number_of(count, noun)}{rest}" for count, noun, rest in parts if count)
        noun = "study" if len(self.studies) == 1 else "studies"
        lines = [f"{noun} {', '.join(self.studies)}, with {counts or 'nothing in it'}."]
        if self.trials:
            lines.append("Later searches cannot use these measurements; layer profiles stay.")
        if self.calibrations:
            lines.append("Later searches on similar workloads do not start from its calibration.")
        if self.heirs:
            lines.append(
                f"Later studies of the same workload: {', '.join(self.heirs)}. They may have used these results; "
                "their winners stay, but are judged without these runs, so that doubts about them may no longer be "
                "named; plans that only a deleted study tried can no longer be shown, and `launch` no longer takes "
                "one that was faster."
            )
        return "\n".join(lines)
