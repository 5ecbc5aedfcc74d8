"""Uniform sampling of the parameters."""

from optuna.samplers import BaseSampler, RandomSampler

from autotune.search.sampling.context import Nearest, SamplerContext


def sampler(context: SamplerContext) -> BaseSampler:
    return Nearest(RandomSampler(seed=context.seed), context.space)
