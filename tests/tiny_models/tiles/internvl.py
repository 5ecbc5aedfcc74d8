"""InternVL, as the example makes it, with fewer and narrower layers."""

import importlib
import json
from pathlib import Path

import pytest

_GENERATOR = Path(__file__).parents[3] / "examples" / "tiny-internvl" / "generate.py"


def make(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_GENERATOR.parent))
        importlib.import_module(_GENERATOR.stem).make_model(folder, ["A circle and a square."])
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"] |= {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64}
    config["text_config"] |= {"num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 96}
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:4]
    file.write_text(json.dumps(config))
