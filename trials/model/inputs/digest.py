"""A digest of what a sample's lengths depend on besides the sample."""

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import PIL
import tokenizers
import transformers

from trials import model
from trials.data.source_code import code_digest

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""End of the messages of Rust libraries for errors of the operating system."""


def model_digest(
    kind: type, config: Any, tokenizer: Any, processor: Any, max_tokens: int | None, *, videos: Any = None
) -> str:
    """Return the first 32 hexadecimal digits of a SHA-256.

    It covers the measuring class, the code for models, the model's configuration but not where that is, all that its
    tokenizer and processor would save, their chat templates, the limit, the settings of `videos`, and the libraries'
    versions. Raise OSError when the temporary folder is full or read-only.
    """
    digest = hashlib.sha256()
    versions = [library.__version__ for library in (transformers, tokenizers, PIL)]
    name = f"{kind.__module__}.{kind.__qualname__}"
    settings = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    # `to_dict` leaves the template out, and the tokenizer saves its own alone.
    written = processor.to_dict(), processor.chat_template
    facts = [code_digest(model), name, settings, written, max_tokens, versions]
    if videos:
        facts.append(videos)
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # what the Rust library raises for a full or read-only folder, too
            refused = _OS_ERROR.search(str(error))
            if refused is None:
                raise
            code = int(refused[1])
            raise OSError(code, os.strerror(code), folder) from error
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:32]
