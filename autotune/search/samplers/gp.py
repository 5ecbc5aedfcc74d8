"""Optuna's Gaussian process with expected improvement, over all parameters jointly."""

from optuna.samplers import BaseSampler, GPSampler

from autotune.search.sampling.context import Guide, Nearest


def sampler(guide: Guide) -> BaseSampler:
    """Learns from the second trial on: the seeds of the search stand for its random start."""
    return Nearest(GPSampler(seed=guide.seed, n_startup_trials=2, warn_independent_sampling=False), guide.space)
