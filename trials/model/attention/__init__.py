"""Attention inside each sample of a pack, and none between samples: the samples, the kernels, and what layers call."""
