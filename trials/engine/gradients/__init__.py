"""Gradients between the backward pass and the update: what ranks sum, average and clip."""
