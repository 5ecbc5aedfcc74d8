"""Optuna's tree-structured Parzen estimator, over all parameters jointly."""

from optuna.samplers import BaseSampler, TPESampler

from autotune.search.sampling.context import Guide, Nearest


def sampler(guide: Guide) -> BaseSampler:
    """Learns from the first trial on: the seeds of the search stand for its random start."""
    return Nearest(TPESampler(seed=guide.seed, multivariate=True, n_startup_trials=1), guide.space)
