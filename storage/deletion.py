"""What a deletion of studies removes, and the processes that use them."""

from dataclasses import dataclass

from storage.records import AgentRecord


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
