"""The tokens at which the answers of a model end."""

from typing import Any

from transformers import GenerationConfig, PretrainedConfig


def stop_tokens(path: str, config: PretrainedConfig, tokenizer: Any) -> frozenset[int]:
    """Return the ids at which transformers ends an answer of the model folder, and its tokenizer's end of text."""
    try:
        settings = GenerationConfig.from_pretrained(path)
    except OSError:  # where there is none, transformers makes it from the configuration
        settings = GenerationConfig.from_model_config(config)
    stated = settings.eos_token_id
    every = [*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id]
    return frozenset(token for token in every if token is not None)
