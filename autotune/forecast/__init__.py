"""Forecasts of plans without running them, on this machine or other devices."""
