"""Packs arranged into optimizer steps whose samples are as mixed as those of random order."""
