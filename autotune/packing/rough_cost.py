"""The cost of a model that cannot be trained here, so that its packs can be matched all the same."""

import copy
from typing import Literal

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.data.epoch import CostWeights
from trials.model.refusals.refusal import refusing


def rough_weights(config: PretrainedConfig) -> CostWeights:
    """Estimate forward floating-point operations from the model's parameters: 2 for each parameter and token.

    Tokens of the head are targets. All that is neither language model nor head counts as vision, on every token of the
    tower. Its attention is counted inside a tile (Megatron-LM, appendix); where the tower takes images in their own
    resolution it is left out. Every expert of a layer counts.
    Raise ModelError for a model that transformers cannot build, or that is of another kind.
    """
    with refusing(f"the cost of model type {config.model_type!r} cannot be estimated", "use another model"):
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForImageTextToText.from_config(copy.deepcopy(config))
        text, embedding, head = config.get_text_config(), _matrix(model, "input"), _matrix(model, "output")
        vision_config, attention = config.vision_config, 0
        if merge := getattr(vision_config, "spatial_merge_size", None):  # images in their own resolution
            unit_tokens = merge**2
        else:
            unit_tokens = (_side(vision_config.image_size) // _side(vision_config.patch_size)) ** 2
            attention = 4 * vision_config.num_hidden_layers * unit_tokens**2 * vision_config.hidden_size
        square = float(2 * text.num_hidden_layers * text.hidden_size)
    # The word embedding belongs to the language model without its head.
    path = next(name for name, parameter in model.named_parameters() if parameter is embedding)
    language = _parameters(model.get_submodule(path.rsplit(".", 2)[0]))
    vision = _parameters(model) - language - (0 if head is embedding else head.numel())
    return CostWeights(
        unit=float(2 * vision * unit_tokens + attention),
        token=float(2 * (language - embedding.numel())),
        target=float(2 * head.numel()),
        square=square,
    )


def _side(size: int | list[int] | tuple[int, ...]) -> int:
    return size if isinstance(size, int) else size[0]


def _matrix(model: PreTrainedModel, which: Literal["input", "output"]) -> torch.nn.Parameter:
    """Return the word embedding or the output projection; the same parameter where they are tied."""
    weight: torch.nn.Parameter = getattr(model, f"get_{which}_embeddings")().weight
    return weight


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
