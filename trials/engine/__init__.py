"""Trains a plan's stages with DeepSpeed, and measures time and memory while it does."""
