"""Tiny models of every family, as transformers saves them: one module for each, with `make`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}SHOWN{% elif part['type'] == 'video' %}FILMED{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template in the form of Qwen's; `SHOWN` and `FILMED` are what the model writes for an image and a video."""
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
"""Settings of a language model; add `model_type` and `vocab_size`."""
_CORPUS = [
    "What is in the picture? A red circle is in the picture. Compare them: both are green. Be brief.",
    "First.\n\nSecond.\n\n\nThird.",
]


def save(
    folder: Path,
    *,
    config: Callable[[Mapping[str, int]], Mapping[str, Any]],
    images: Any = None,
    special: Mapping[str, str],
    chat: str,
    tokens: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    videos: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """Write configuration, tokenizer, image processor, chat template and processor settings, without weights.

    A model for text alone has no image processor, and no settings of a processor.
    `config` gets the ids of all tokens by their text, and returns the configuration's settings with their `model_type`.
    `videos` are settings of a video processor.
    `special` names tokens of the tokenizer, such as `image_token`; `tokens` are further ones.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    every = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special.values(), *tokens]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=every, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=dict(special),
    )
    fast.save_pretrained(folder)
    if images is not None:
        images.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(dict(settings or {})))
    if videos is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(dict(videos)))
    (folder / "chat_template.jinja").write_text(chat)
    described = dict(config(fast.get_vocab()))
    made: PreTrainedConfig = AutoConfig.for_model(described.pop("model_type"), **described)
    made.save_pretrained(folder)
    return made
