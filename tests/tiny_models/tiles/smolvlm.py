"""SmolVLM: word embedding and output projection are one, and images are not split."""

from pathlib import Path

from transformers import SmolVLMImageProcessorPil

from tests.tiny_models.tiles.idefics3 import TILE, write


def make(folder: Path) -> None:
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": 3 * TILE}, max_image_size={"longest_edge": TILE}, do_image_splitting=False
    )
    write(folder, images, "smolvlm", tie_word_embeddings=True)
