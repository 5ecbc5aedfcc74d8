"""The example's model with weights, in a folder as transformers saves it."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel


def saved_model(
    example: Path, folder: Path, *, tied: bool = False, text: dict[str, Any] | None = None
) -> PreTrainedModel:
    """The example's model, with its tokenizer in `folder`; `text` describes another language model."""
    shutil.copytree(example / "model", folder, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(folder)
    if text is not None:
        size = config.text_config.vocab_size
        config.text_config = AutoConfig.for_model(**text, vocab_size=size, num_hidden_layers=3, pad_token_id=0)
    if tied:
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return model
