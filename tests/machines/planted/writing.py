"""Faults in the weights that a training writes, which a certificate must name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig

from trials.tasks import session
from trials.tasks.training import adapter, checkpoint


def _writing(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> AbstractContextManager[Any]:
    weights = checkpoint._weights
    return patch.object(checkpoint, "_weights", lambda session: iter(change(dict(weights(session))).items()))


def swapped_layers() -> AbstractContextManager[Any]:
    """Write the weights of a layer under the name of another."""

    def swapped(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [name for name in found if name.endswith("attention.q_proj.weight")]
        return {**found, names[0]: found[names[-1]].clone()} if len(names) > 1 else found

    return _writing(swapped)


def written_early() -> AbstractContextManager[Any]:
    """Write the weights that were there before the last update."""
    earlier: dict[str, torch.Tensor] = {}
    weights, run = checkpoint._weights, session.Session.step

    def step(self: session.Session, *arguments: Any) -> float:
        earlier.update(dict(weights(self)))
        return run(self, *arguments)

    stack = patch.multiple(checkpoint, _weights=lambda _: iter(earlier.items()))

    @contextmanager
    def both() -> Iterator[None]:
        with stack, patch.object(session.Session, "step", step):
            yield

    return both()


def written_twice() -> AbstractContextManager[Any]:
    """Write both copies of a tied weight, the second one as it was before the last update."""

    def twice(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next((each for each in found if each.endswith("embed_tokens.weight")), None)
        return found if name is None else {**found, "lm_head.weight": found[name] + 1e-3}

    return _writing(twice)


def lost_tensor() -> AbstractContextManager[Any]:
    """Leave a weight out."""
    return _writing(lambda found: dict(list(found.items())[1:]))


def other_type() -> AbstractContextManager[Any]:
    """Write the weights in half precision."""
    return _writing(lambda found: {name: each.half() for name, each in found.items()})


def other_alpha() -> AbstractContextManager[Any]:
    """Write twice the alpha into the configuration of adapters."""
    configuration = adapter._configuration

    def doubled(found: session.Session) -> LoraConfig:
        config = copy(configuration(found))
        config.lora_alpha *= 2
        return config

    return patch.object(adapter, "_configuration", doubled)


SAVING_FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "a layer written from another": swapped_layers,
    "written before the last update": written_early,
    "a tied weight written twice": written_twice,
    "a weight left out": lost_tensor,
    "another type": other_type,
}
