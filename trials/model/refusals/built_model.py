"""Refusals of a model that is built: another head than one linear layer, and parameters that stay in float32."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from trials.errors import ModelError

# A choice: names of weights come from a file and may be of any length.
_SHOWN = 60


def check_output_head(model: PreTrainedModel) -> None:
    """Raise ModelError for another head than one linear layer, with or without a bias.

    Stages compute the logits of the rows with a label alone.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(
            f"its head is a {type(head).__name__}, of which stages know nothing; use a model whose head is one linear "
            "layer"
        )


def check_kept_types(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Raise ModelError where `from_pretrained` keeps parameters in float32 of a model that is built with `dtype`.

    DeepSpeed casts every parameter to that type, so that rounded ones would be trained and saved. It leaves buffers as
    they are.
    """
    kept = kept_in_float32(model, dtype)
    if kept:
        raise ModelError(
            f"model.dtype is {str(dtype).removeprefix('torch.')}, but transformers keeps {len(kept)} weights of this "
            f"model in float32, such as {kept[0][:_SHOWN]}, and the engine trains all weights in one type; set "
            "model.dtype to float32"
        )


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Return the parameters, and buffers of another type here, that a model of `dtype` has in float32."""
    plan = list(model._get_dtype_plan(dtype))
    named = build_glob_alternation(plan)[0].search if plan else lambda _: None
    return [
        *(name for name, each in model.named_parameters() if each.dtype != dtype or named(name)),
        *(name for name, each in model.named_buffers() if each.dtype != torch.float32 and named(name)),
    ]
