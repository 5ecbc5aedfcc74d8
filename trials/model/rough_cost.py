"""The cost of a model that cannot be trained here, so that its packs can be matched all the same."""

import copy
from typing import Literal

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.data.epoch import CostWeights
from trials.model.refusal import refusing


def rough_weights(config: PretrainedConfig) -> CostWeights:
    """Forward floating-point operations from the model's parameters: 2 for each of them and token.

    All that is neither language model nor head counts as vision, on every token of the tower. Its attention is counted
    inside a tile; where the tower takes images in their own resolution it is left out. Every expert of a layer counts.
    Raises ModelError for a model that transformers cannot build, or that is of another kind.
    """
    with refusing(f"the cost of model type {config.model_type!r} cannot be estimated", "use another"):
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForImageTextToText.from_config(copy.deepcopy(config))
        text, embedding, head = config.get_text_config(), _matrix(model, "input"), _matrix(model, "output")
        unit_tokens, attention = _unit(config.vision_config)
        square = float(2 * text.num_hidden_layers * text.hidden_size)
    language = _parameters(_parent(model, embedding))
    vision = _parameters(model) - language - (0 if head is embedding else head.numel())
    return CostWeights(
        unit=float(2 * vision * unit_tokens + attention),
        token=float(2 * (language - embedding.numel() + head.numel())),
        square=square,
    )


def _unit(vision: PretrainedConfig) -> tuple[int, int]:
    """Tokens of a vision unit inside the tower, and the operations of its attention (Megatron-LM, appendix)."""
    merged = getattr(vision, "spatial_merge_size", None)
    if merged:
        return merged**2, 0
    tokens = (_side(vision.image_size) // _side(vision.patch_size)) ** 2
    return tokens, 4 * vision.num_hidden_layers * tokens**2 * vision.hidden_size


def _side(size: int | list[int] | tuple[int, ...]) -> int:
    return size if isinstance(size, int) else size[0]


def _matrix(model: PreTrainedModel, which: Literal["input", "output"]) -> torch.nn.Parameter:
    """The word embedding or the output projection; one and the same where they are tied."""
    weight: torch.nn.Parameter = getattr(model, f"get_{which}_embeddings")().weight
    return weight


def _parent(model: PreTrainedModel, weight: torch.nn.Parameter) -> torch.nn.Module:
    """The module that the word embedding belongs to: the language model without its head."""
    name = next(name for name, parameter in model.named_parameters() if parameter is weight)
    return model.get_submodule(name.rsplit(".", 2)[0])


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
