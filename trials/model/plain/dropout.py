"""Dropout of a model: what is on, and a switch that turns all of it off."""

from collections.abc import Iterator

from torch import nn


def active_dropouts(model: nn.Module) -> dict[str, float]:
    """Return the share of each dropout of the model in its mode, by its path; 0 for one that is off."""
    return {
        f"{path}.{name}".strip("."): share if module.training else 0.0
        for path, module in model.named_modules()
        for name, share in _shares(module)
    }


def without_dropout(model: nn.Module) -> None:
    """Set every dropout of the model to 0: masks differ between passes, so gradients could not be compared."""
    for module in model.modules():
        for name, _ in list(_shares(module)):
            setattr(module, name, 0.0)


def _shares(module: nn.Module) -> Iterator[tuple[str, float]]:
    if isinstance(module, nn.Dropout):
        yield "p", module.p
    for name, value in vars(module).items():
        if name.endswith("dropout") and isinstance(value, float):
            yield name, value
