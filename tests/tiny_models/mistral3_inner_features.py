"""Mistral 3 with the features of a layer before the last, and an output projection that is the word embedding."""

from pathlib import Path

from tests.tiny_models import mistral3


def make(folder: Path) -> None:
    mistral3.make(folder, vision_feature_layer=[-2], tie_word_embeddings=True)
