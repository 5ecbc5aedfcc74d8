"""Recorded surfaces: plans of a job that were measured on real ranks, to compare searches on."""
