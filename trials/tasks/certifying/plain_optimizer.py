"""AdamW, weight decay, clipping and the schedule by their definitions: torch's and transformers' own."""

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

import torch
from torch import nn
from transformers import get_scheduler

from trials.job import TrainingSection
from trials.workload import Part


def decays(name: str, weight: torch.Tensor) -> bool:
    """Return whether a parameter has weight decay: none of norms, biases and others with fewer than two dimensions."""
    return weight.dim() > 1 and not name.endswith("bias")


def trains(training: TrainingSection, name: str, part: Part) -> bool:
    """Return whether the job trains a parameter."""
    match training.mode_of(part):
        case "whole":
            return True
        case "frozen":
            return False
        case "adapters":
            return ".lora_A." in name or ".lora_B." in name


def factors(training: TrainingSection, total: int, steps: Iterable[int]) -> list[float]:
    """Return factors of the learning rates, by transformers' schedulers, in `steps` of `total`, counted from 0."""
    # Fractions, because 100 times the float 0.07 is above 7.
    share = Fraction(str(training.warmup))
    warmup = math.ceil(share * total) if share < 1 else int(share)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if training.schedule == "constant" else training.schedule
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    (factor,) = scheduler.lr_lambdas
    return [float(factor(step)) for step in steps]


def clip_share(norm: float, clip_norm: float | None) -> float:
    """Return the factor of clipped gradients, as torch's `clip_grad_norm_` has it."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


class PlainAdamW:
    """torch's AdamW for each parameter alone, on the device of the training; all is kept on the CPU in between."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        rates: Mapping[str, float],
        training: TrainingSection,
        device: torch.device,
    ) -> None:
        """`weights` are those before the first step, float32, and `rates` their learning rates before the schedule."""
        self.weights = dict(weights)
        self.settings = {
            name: (rates[name], training.weight_decay if decays(name, weight) else 0.0)
            for name, weight in weights.items()
        }
        self._betas, self._device = training.betas, device
        self._states: dict[str, dict[str, torch.Tensor]] = {}

    def update(self, gradients: Mapping[str, torch.Tensor], factor: float) -> None:
        """Run a step with `factor` times the learning rates."""
        for name, (rate, decay) in self.settings.items():
            parameter = nn.Parameter(self.weights[name].to(self._device, copy=True))
            parameter.grad = gradients[name].to(self._device)
            optimizer = torch.optim.AdamW(
                [parameter],
                lr=rate * factor,
                betas=self._betas,
                weight_decay=decay,
                fused=self._device.type == "cuda",
            )
            if name in self._states:
                held = self._states[name].items()
                optimizer.state[parameter] = {key: value.to(self._device) for key, value in held}
            optimizer.step()
            self._states[name] = {key: value.cpu() for key, value in optimizer.state[parameter].items()}
            self.weights[name] = parameter.detach().cpu()
