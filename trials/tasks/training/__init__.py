"""The full training: its steps, settings, output folder and checkpoints."""
