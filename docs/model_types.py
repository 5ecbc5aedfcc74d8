"""The table of docs/models.md: every model type of the installed transformers that takes images, trained or why not.

`make chart` writes it again.
"""

from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from trials.errors import ModelError
from trials.model.family import load_family

MODELS = Path(__file__).parent / "models.md"
_TITLE = "## Every model type that takes images"


def written() -> str:
    """Return docs/models.md with the table of the installed transformers."""
    before, title, _ = MODELS.read_text().partition(_TITLE)
    table = "".join(f"| {name} | {answer} |\n" for name, answer in _rows())
    version = ".".join(transformers.__version__.split(".")[:2])
    return (
        f"{before}{title}\n\nBy the default configuration of each type in transformers {version}:\n\n"
        f"| model type | trained, or the reason |\n|---|---|\n{table}"
    )


def _rows() -> Iterator[tuple[str, str]]:
    for name in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        try:
            load_family(AutoConfig.for_model(name))
            yield name, "trained"
        except ModelError as error:
            yield name, str(error).partition("is not supported: ")[2].partition("; supported are")[0]


if __name__ == "__main__":
    MODELS.write_text(written())
