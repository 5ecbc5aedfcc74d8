"""What ranks that share packs exchange in the attention of a language layer."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWidths:
    """Widths of the attention of a language layer, on which the size of its exchanges depends."""

    heads: int
    key_heads: int
    head_size: int

    @classmethod
    def of(cls, config: Any) -> "AttentionWidths":
        """Return those of a language model's configuration."""
        heads = config.num_attention_heads
        return cls(
            heads=heads,
            key_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    def values_per_token(self, degree: int) -> float:
        """Return the values that leave a rank for each of its tokens in a forward pass: query, key, value, result.

        Of each, the share (degree - 1) / degree goes to other ranks (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2).
        With fewer key-value heads than ranks each head goes to several.
        """
        key_heads = max(self.key_heads, degree)
        return 2 * (self.heads + key_heads) * self.head_size * (degree - 1) / degree
