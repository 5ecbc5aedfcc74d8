"""Prediction of a plan's time and memory from profiled layers."""
