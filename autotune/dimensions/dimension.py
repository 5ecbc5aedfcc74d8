"""What a dimension of layouts says and does; a subclass overrides what concerns it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts
from trials.plan import Layout, Packing, Plan
from trials.stage import Tower
from trials.workload import Hardware, Workload

if TYPE_CHECKING:
    from trials.job import Job


class PlanSolver(Protocol):
    """What dimensions ask the solver of plans, `autotune.search.solver.solver.Solver`."""

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor degrees above 1 that the profile timed."""

    def unprofiled(self, layout: Layout) -> str | None:
        """Return the exchanges that plans with this layout need and the profile has not timed, in words."""

    def overlapped(self, layout: Layout) -> Layout:
        """Return the layout with averages during the last backward pass, where that helps."""

    def keeps_batch(self, packing: Packing, layout: Layout) -> bool:
        """Return whether steps have about as many samples as the job wants."""

    def solve(self, packing: Packing, layout: Layout) -> Plan | None:
        """Return the fastest plan, or None where none fits the memory."""

    def epoch_seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the predicted epoch seconds of each plan."""

    def admits(self, plan: Plan) -> bool:
        """Return whether the plan keeps the batch and fits the memory of devices and host."""

    def reduction_seconds(self, layout: Layout) -> float:
        """Return the seconds of averaging a byte of gradients."""

    def recompute_seconds(self, packing: Packing, layout: Layout) -> Mapping[Tower, float]:
        """Return the seconds that freeing the memory of a layer of each tower takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherLayouts:
    """Layouts of one kind that may be searched in addition to the usual ones."""

    possible: tuple[Layout, ...]
    helps: Callable[[Packing, Layout], bool] | None = None
    """Return whether such a layout may help with a packing; None where each may."""
    searched: str
    """`Tensor degrees are`"""
    usual: str
    """`tensor degree 1`"""
    usual_alone: str
    """`Tensor degree 1 is best and the only one that is searched`"""
    cannot_help: str = ""
    """Why none can help where none `helps` with any packing."""


class Dimension:
    """A field of `Layout`. By itself it has no part in names and texts, allows each value and is always known."""

    pattern = ""
    """Regular expression of its part of a layout's name, with groups that are named by fields of `Layout`."""

    def code(self, layout: Layout) -> str:
        """Return its part of the layout's name, which `pattern` matches; empty for the usual value."""
        return ""

    def value(self, code: str) -> Any:
        """Return the value of the field that a group of `pattern` has found."""
        return int(code)

    def text(self, layout: Layout, times: str) -> str:
        """Return its part of the layout's text, with what joins it to the parts before; `times` stands in products."""
        return ""

    def coordinates(self, layout: Layout) -> tuple[float, ...]:
        """Return where the layout lies along the dimension: at a distance of 1 layouts have little in common."""
        return ()

    def check_devices(self, layout: Layout, workload: Workload) -> None:
        """Raise InvalidPlan, with the arithmetic, for a value that the devices or the chain of layers cannot have."""

    def check(self, layout: Layout, job: "Job", hardware: Hardware) -> None:
        """Raise InvalidPlan, with the reason, for a value that the model, its training or the nodes do not allow."""

    def unprofiled(self, costs: LayerCosts, layout: Layout, *, exactly: bool) -> str | None:
        """Return what plans with the layout need beyond the costs of a profile; None where they can be predicted.

        With `exactly`, for plans that are to be compared, a value counts as known only if it was timed itself.
        """
        return None

    def exchanges(
        self, costs: LayerCosts, layout: Layout, sequence: int, others: Sequence[Exchange]
    ) -> Sequence[Exchange]:
        """Return what ranks exchange for packs that `sequence` data ranks compute together, as the profile timed it.

        `others` are those of the dimensions before, which it may replace.
        """
        return others

    def further(self, workload: Workload, solver: PlanSolver) -> FurtherLayouts | None:
        """Return the layouts beyond the usual ones that a search may try; None for a dimension without any."""
        return None
