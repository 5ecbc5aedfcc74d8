"""Whether the output projection of a model is its word embedding, or a matrix of its own."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from trials.errors import ModelError
from trials.model.hub import published_name
from trials.model.refusals.folder import CONFIG
from trials.model.weight_files import chosen_files, opened

_TIES = "tie_word_embeddings"
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
"""How the names of both matrices end in files, whatever the model around them."""
# A choice: blocks of this size take some tens of megabytes.
_ROWS = 1 << 12


def separate_head(config: PretrainedConfig, settings: Mapping[str, Any], folder: Path) -> str | None:
    """Set in `config` that the head is a matrix of its own, where `folder` shows it; return what a user should know.

    `settings` are those of the file that `config` was read from. transformers 5 asks the configuration of the whole
    model, which by default ties both in many families. Models from before were saved without a word on that, and theirs
    is in the language model's. So `from_pretrained` does not tie matrices that differ, and neither does this. Without
    weights the language model's word counts: a model has more parameters then, not less, than transformers gives it.
    """
    if not getattr(config, _TIES, False):
        return None
    differ = _weights_differ(folder)
    if not (_says_apart(config, settings) if differ is None else differ):
        return None
    # In both: PaddleOCR-VL and others tie the whole model where the language model says so.
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    file = f"the {CONFIG} of model {published_name(str(folder))}"
    if differ and settings.get(_TIES):
        return (
            f"{file} says that word embedding and output projection are one matrix, but the weights have two that "
            f"differ; both are used, as by transformers. Set {_TIES} to false in that file if this is right"
        )
    if not (differ or _TIES in settings):
        return (
            f"{file} has no {_TIES}, and there are no weights to show whether word embedding and output projection "
            f"are one matrix; they are taken for two, as in its text_config. Set {_TIES} at the top level of that file"
        )
    return None


def _says_apart(config: PretrainedConfig, settings: Mapping[str, Any]) -> bool:
    if "text_config" in settings:
        return _TIES not in settings and not config.get_text_config().tie_word_embeddings
    # Settings of PaddleOCR-VL's language model may stand at the top level, where transformers passes over this one.
    return settings.get(_TIES) is False


def _weights_differ(folder: Path) -> bool | None:
    """Return whether the files hold both matrices, and not twice the same; None where no weights can be read."""
    try:
        files = chosen_files(folder).files
        return _differ(folder, tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))
    except (ModelError, OSError):  # named where weights are needed
        return None


@lru_cache(maxsize=4)
def _differ(folder: Path, _versions: tuple[tuple[Path, int, int], ...]) -> bool:
    """Compare what the files hold; it is done again when one of them has changed."""
    held = chosen_files(folder).tensors()
    heads, embeddings = ([key for key in held if f".{key}".endswith(f".{name}")] for name in (_HEAD, _EMBEDDING))
    if len(heads) != 1 or len(embeddings) != 1:
        return False
    (head, shape), (embedding, shape_of_other) = held[heads[0]], held[embeddings[0]]
    if shape != shape_of_other:
        return True
    with opened(head) as first, opened(embedding) as second:
        left, right = first.get_tensor(heads[0]), second.get_tensor(embeddings[0])  # mapped, not read
        kind = torch.promote_types(left.dtype, right.dtype)
        # Of matrices that differ, the first rows show it.
        return not all(
            torch.equal(each.to(kind), other.to(kind))
            for each, other in zip(left.split(_ROWS), right.split(_ROWS), strict=True)
        )
