"""Optuna's Gaussian process with expected improvement, over all parameters jointly."""

from optuna.samplers import BaseSampler, GPSampler

from autotune.search.sampling.context import Nearest, SamplerContext


def sampler(context: SamplerContext) -> BaseSampler:
    """Return a sampler that learns from the second trial on: the seeds of the search replace its random start."""
    return Nearest(GPSampler(seed=context.seed, n_startup_trials=2, warn_independent_sampling=False), context.space)
