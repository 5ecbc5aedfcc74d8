"""Tokens of samples that were made once, when their lengths were measured, and are kept beside these."""
