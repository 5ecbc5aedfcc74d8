"""Costs of layers without a device: what is loaded for them."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.usefixtures("home")
def test_a_recommendation_does_not_load_deepspeed(example: Path) -> None:
    arguments = ["recommend", str(example / "model"), str(example / "data" / "train.jsonl"), "--device", "a10"]
    code = f"import sys, autotune.cli as cli; cli.main({[*arguments, '--devices', '1']}, standalone_mode=False)"
    program = f"{code}; print('torch' in sys.modules, 'deepspeed' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "does not fit" not in answer.stdout
    assert answer.stdout.splitlines()[-1] == "True False"
