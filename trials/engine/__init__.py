"""Training of a plan's stages with DeepSpeed, with measurement of time and memory."""
