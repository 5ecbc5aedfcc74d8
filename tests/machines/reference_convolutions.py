"""Whether cuDNN may round what the convolutions of transformers' own model take, while it makes a reference."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from trials.data.records.sample import NO_GRIDS, Encoded
from trials.engine.group import process_group
from trials.job import ModelSection, TrainingSection
from trials.model.family import load_family
from trials.tasks.certifying.reference import build_model, model_results


def roundings_allowed(folder: Path) -> tuple[list[bool], bool]:
    """Return what holds in the forward and the backward pass of a sample with an image, and what holds after them.

    The model is that of `folder / "model"`, whose units are tiles.
    """
    settings = ModelSection(path=str(folder / "model"), weights="random", dtype="float32")
    found = list[bool]()

    def look(*_: object) -> None:
        found.append(torch.backends.cudnn.allow_tf32)

    def look_twice(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        look()
        output.register_hook(look)

    with process_group(0, 0, 1, f"file://{folder}/rendezvous") as device:
        model = build_model(settings, TrainingSection(), device)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(look_twice)
        images = load_family(model.config).random_images(model.config, 1)
        ids = torch.cat([images.input_ids, torch.arange(4)]).numpy()
        sample = Encoded(
            input_ids=ids,
            labels=ids,
            positions=np.arange(len(ids))[None],
            pixel_values=images.pixels.numpy(),
            grids=NO_GRIDS,
        )
        model_results(model, [sample], [1.0], lambda _: False)
    return found, torch.backends.cudnn.allow_tf32
