"""Optuna's tree-structured Parzen estimator, over all parameters jointly."""

from optuna.samplers import BaseSampler, TPESampler

from autotune.search.sampling.context import Nearest, SamplerContext


def sampler(context: SamplerContext) -> BaseSampler:
    """Return a sampler that learns from the first trial on: the seeds of the search replace its random start."""
    # Multivariate, since the axes of a plan depend on each other; Optuna's default takes each alone.
    return Nearest(TPESampler(seed=context.seed, multivariate=True, n_startup_trials=1), context.space)
