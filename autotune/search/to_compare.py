"""The baselines that a search has not tried yet."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.search.baselines import needed_baselines
from autotune.search.execution.ledger import Ledger
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.roles import BASELINES, Role
from autotune.search.sampling.advisor import Advisor
from storage.records import TrialRecord
from trials.plan import Plan

# A choice: further neighbours differ by single layers and would spend the budget of the sampler.
NEIGHBOURS = 2
"""Further plans that are tried of each kind of baseline: those predicted fastest."""


@dataclass(slots=True, kw_only=True)
class ToCompare:
    """Baselines that were not tried yet, by kind; the first of each kind is the one to begin with."""

    ledger: Ledger
    advisor: Advisor
    predictor: CalibratedPredictor
    plans: defaultdict[Role, list[Plan]] = field(init=False, default_factory=lambda: defaultdict(list))

    def needed(self) -> set[Role]:
        """Return the kinds whose first plan runs whatever the budget is."""
        return needed_baselines({role: plans[0] for role, plans in self.plans.items()}, self.predictor)

    def further(self, role: Role) -> Plan | None:
        """Return the plan of a kind that is predicted fastest, of those that may fit."""
        fitting = filter(self.advisor.may_fit, self.plans[role])
        return min(fitting, key=self.predictor.epoch_seconds, default=None)

    def kept(self, spent: Sequence[TrialRecord], trials: int) -> int:
        """Count the trials kept for further plans; all baselines together take about a quarter of the `trials`."""
        compared = sum(trial.role in BASELINES for trial in spent)
        most = 0
        for plans in self.plans.values():
            untried = sum(self.ledger.answer(plan) is None for plan in plans)
            most += min(untried, max(NEIGHBOURS - (len(plans) - untried), 0))
        return min(most, max(trials // 4 + 1 - compared, 0))
