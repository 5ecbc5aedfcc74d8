"""Any plan of the space with equal chance."""

from optuna.samplers import BaseSampler, RandomSampler

from autotune.search.sampling.context import Guide, Nearest


def sampler(guide: Guide) -> BaseSampler:
    return Nearest(RandomSampler(seed=guide.seed), guide.space)
