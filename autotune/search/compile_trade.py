"""What compiling layers gives over a whole training, against what it costs."""

import math
from dataclasses import dataclass, replace

from autotune.prediction.costs_table import TypicalPack
from autotune.search.compile_setting import MARGIN
from trials.layer_costs import KINDS, LayerCosts, LayerKind

_COMPILED: tuple[LayerKind, ...] = ("vision", "language")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTrade:
    """Steps of the best plan with layers as they are and with compiled ones, and the cost of compiling."""

    plain_step_seconds: float
    compiled_step_seconds: float
    error: float
    """Share of the time by which the two may differ although the layers are equally fast."""
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
    """Return the plain costs with those of the compiled layers: noise of all that is not compiled is no gain."""
    layers = tuple((kind, (compiled if kind in _COMPILED else plain)[kind]) for kind in KINDS)
    return replace(plain, layers=layers, compile_seconds=compiled.compile_seconds)


def profiles_error(plain: LayerCosts, compiled: LayerCosts, pack: TypicalPack) -> float:
    """Return by which share of the time two profiles differ by themselves.

    Embedding, projector and head are compiled in neither, so their times show how far the machine has changed between
    the two. The spread of repeats is nearly two standard errors of the ratio of two medians of five.
    """
    kinds = [kind for kind in KINDS if plain[kind].parameters]
    then, now = (
        sum(sum(pack.seconds(costs, kind)[:2]) for kind in kinds if kind not in _COMPILED)
        for costs in (plain, compiled)
    )
    noise = max(costs[kind].noise for costs in (plain, compiled) for kind in kinds if kind in _COMPILED)
    return noise + abs(now / then - 1)
