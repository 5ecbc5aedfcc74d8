"""What a deletion of studies takes away, and what uses them."""

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
    """What goes with some studies. Counts are of rows."""

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
    """Names of other studies that may have counted results of these: they keep their winners."""
    uses: tuple[Use, ...]
    """Processes that keep the studies from being deleted while they live."""
