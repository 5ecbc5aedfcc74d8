"""Certificates: whether a plan computes the gradients of the plain model."""
