"""What a sample's lengths depend on besides the sample, as one short text."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import PIL
import tokenizers
import transformers


def model_digest(kind: type, config: Any, tokenizer: Any, processor: Any, max_tokens: int | None) -> str:
    """The first 32 hexadecimal digits of a SHA-256.

    Of the measuring class, the model's configuration, all that its tokenizer and processor would save, the limit, and
    the libraries' versions.
    """
    digest = hashlib.sha256()
    versions = [library.__version__ for library in (transformers, tokenizers, PIL)]
    facts = [f"{kind.__module__}.{kind.__qualname__}", config.to_dict(), processor.to_dict(), max_tokens, versions]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:32]
