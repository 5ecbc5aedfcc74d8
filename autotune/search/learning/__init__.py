"""Corrections of the predictions by the trials of this search and of earlier ones."""
