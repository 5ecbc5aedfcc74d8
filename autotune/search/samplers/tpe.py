"""Optuna's tree-structured Parzen estimator, over all parameters jointly."""

from optuna.samplers import BaseSampler, TPESampler


def sampler(seed: int) -> BaseSampler:
    """Learns from the first trial on: the seeds of the search stand for its random start."""
    return TPESampler(seed=seed, multivariate=True, n_startup_trials=1)
