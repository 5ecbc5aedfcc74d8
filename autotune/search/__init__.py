"""Finds the best plan: baselines and predictions first, then a sampler, then repeated runs of the finalists."""
