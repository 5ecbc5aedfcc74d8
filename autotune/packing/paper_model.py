"""OmniBal's own model, whose cost weighs lengths when no model is named: InternViT-6B and InternLM2-20B.

Source: the training configuration in OmniBal's code (ModelTC/OmniBal), and the published shapes of the two parts.
"""

from trials.data.epoch import CostWeights

NAME = "OmniBal's InternViT-6B + InternLM2-20B"

_VISION_LAYERS, _VISION_HIDDEN, _VISION_MLP = 45, 3200, 12800
_VISION_TOKENS = (448 // 14) ** 2 + 1
"""Patches of a tile, and the class token."""
_IMAGE_TOKENS = 256
"""Of a tile in the language model: each has the states of 4 patches, joined."""
_LAYERS, _HIDDEN, _MLP = 48, 6144, 16384
_HEADS, _KEY_HEADS = 48, 8
_VOCABULARY = 92_544


def paper_weights() -> CostWeights:
    """Return the forward floating-point operations, counted as `trials.model.shape` counts those of other models.

    A matrix of n parameters costs 2 n per token, attention 4 n^2 h per layer on n tokens, half of it where it is causal
    (Megatron-LM, appendix). The patch embedding and the norms, 0.1 % of a tile, are left out.
    """
    vision = _VISION_LAYERS * (4 * _VISION_HIDDEN**2 + 2 * _VISION_HIDDEN * _VISION_MLP)
    vision_attention = 4 * _VISION_LAYERS * _VISION_TOKENS**2 * _VISION_HIDDEN
    projector = 4 * _VISION_HIDDEN * _HIDDEN + _HIDDEN**2
    attention = 2 * _HIDDEN**2 * (1 + _KEY_HEADS / _HEADS)
    language = _LAYERS * (attention + 3 * _HIDDEN * _MLP)
    return CostWeights(
        unit=float(2 * vision * _VISION_TOKENS + vision_attention + 2 * projector * _IMAGE_TOKENS),
        token=2 * language,
        target=float(2 * _VOCABULARY * _HIDDEN),
        square=float(2 * _LAYERS * _HIDDEN),
    )
