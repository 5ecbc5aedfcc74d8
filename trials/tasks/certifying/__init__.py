"""The task that compares a plan's gradients with a reference, and counts the samples of an epoch."""
