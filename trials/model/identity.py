"""The identity of a model, from its configuration: architecture and sizes, not the place of its folder."""

import hashlib
import json
import re
from typing import Any

from transformers import PretrainedConfig

_OF_THE_WRITER = {
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
}
"""Settings, also of nested configurations, that say where a model came from, or that do not hold for a job: class, data
type and attention. All others count: an unknown one makes another model."""
_CODE = "auto_map"
_HUB = re.compile(r'[^"]*--')
"""Classes of the model's own code; those of a model that came from the hub are called `org/name--module.Class`."""


def config_digest(config: PretrainedConfig) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of what `save_pretrained` writes, without `_OF_THE_WRITER`."""
    own = json.dumps(_own(json.loads(config.to_json_string())), sort_keys=True)
    return hashlib.sha256(own.encode()).hexdigest()[:16]


def _own(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _HUB.sub("", json.dumps(each)) if name == _CODE else _own(each)
            for name, each in value.items()
            if name not in _OF_THE_WRITER
        }
    return [_own(each) for each in value] if isinstance(value, list) else value
