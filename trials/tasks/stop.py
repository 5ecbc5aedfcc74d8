"""When a training is asked to stop."""

from enum import StrEnum


class Stop(StrEnum):
    """When to stop a training. The values name the empty messages by which the agent asks for it."""

    NOW = "stop"
    """After the current step, with a checkpoint."""
    AT_CHECKPOINT = "stop-at-checkpoint"
    """After the next step whose checkpoint is due."""
