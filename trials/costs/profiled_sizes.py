"""The sizes of packs for which a profile was made."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledSizes:
    """Sizes of packs at which layers are timed, about."""

    units: int
    """Vision units of the largest pack; 0 for a model for text alone."""
    image_units: int
    """Vision units of the data's usual image; 0 for data without images."""
    tokens: int
    """Tokens of the largest pack."""
