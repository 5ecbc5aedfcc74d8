"""What compiling layers gives over a whole training, against what it costs."""

import math
from dataclasses import dataclass, replace

from autotune.search.compile_setting import MARGIN
from trials.costs.coefficients import times
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTrade:
    """Steps of the best plan with layers as they are and with compiled ones, and the cost of compiling."""

    plain_step_seconds: float
    compiled_step_seconds: float
    error: float
    """Share of the time by which the layers may be less fast than they were timed."""
    compile_seconds: float
    """Of the slowest rank, for layers of all kinds: all ranks wait for it."""
    steps: int
    """Of the whole training."""

    @property
    def repaid_steps(self) -> int | None:
        """Steps in which compiling is repaid `MARGIN` times by what is clearly gained; None where nothing is."""
        gain = (1 - self.error) * self.plain_step_seconds - self.compiled_step_seconds
        return math.ceil(MARGIN * self.compile_seconds / gain) if gain > 0 else None

    @property
    def pays(self) -> bool:
        return self.repaid_steps is not None and self.repaid_steps <= self.steps

    @property
    def reason(self) -> str:
        """One line with the figures."""
        ratio = self.compiled_step_seconds / self.plain_step_seconds
        what = f"steps with compiled layers take {ratio:.2f} of the time, known to {self.error:.2f}"
        if self.repaid_steps is None:
            return f"{what}, which is no clear gain: not compiled"
        return (
            f"{what}; compiling takes {self.compile_seconds:.0f} s, repaid {MARGIN} times after "
            f"{self.repaid_steps:,} steps; the training has {self.steps:,}: {'' if self.pays else 'not '}compiled"
        )


def only_compiled(plain: LayerCosts, compiled: LayerCosts) -> LayerCosts:
    """Return the plain costs with layers that take their share of the time, and keep what compiled ones keep.

    All else, such as exchanges, was timed for both by itself: its noise is no gain.
    """
    shares = {kind: share for kind, share, _ in compiled.compiled_shares}
    layers = tuple((kind, _scaled(cost, compiled[kind], shares.get(kind))) for kind, cost in plain.layers)
    return replace(plain, layers=layers, compile_seconds=compiled.compile_seconds)


def _scaled(plain: LayerCost, compiled: LayerCost, share: float | None) -> LayerCost:
    if share is None:
        return plain
    return replace(
        compiled,
        forward_seconds=times(plain.forward_seconds, share),
        backward_seconds=times(plain.backward_seconds, share),
        recompute_seconds=times(plain.recompute_seconds, share),
        curve_sizes=plain.curve_sizes,
        curve=plain.curve,
    )
