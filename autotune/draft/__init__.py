"""Drafts of job files, from a model and data or from the configuration of another trainer."""
