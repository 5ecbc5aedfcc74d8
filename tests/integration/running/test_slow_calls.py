"""Calls that a device computes slowly: what is looked at, the faster way."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from autotune.cli import main
from autotune.job_file import load_job
from autotune.machine.devices import locked
from autotune.workload import prepare
from storage.store import open_store
from tests.programs.users import JobFile
from tests.values.search import COSTS
from tests.values.training import variant_of
from trials import wire
from trials.costs.coefficients import SlowCall
from trials.costs.profiled_sizes import ProfiledSizes
from trials.job import ModelSection, TrainingSection
from trials.model import skeleton
from trials.tasks.profiling import slow_calls
from trials.tasks.profiling.layer_profile import quick_slow_calls
from trials.tasks.profiling.slow_calls import Call, Calls, faster_way

CPU = torch.device("cpu")
SLOW_CONVOLUTION = """
import torch
from trials.model import skeleton
from trials.tasks.profiling import slow_calls
skeleton.embed_by_matrix = lambda _: None
slow_calls._seconds = lambda call, _: 0.5 if call.function is torch.conv2d else 0.1
"""
"""That it is slow is planted, since times of one device say nothing of another."""
CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "overlapping": (nn.Conv2d(3, 4, 3), (2, 3, 9, 8)),
    "same": (nn.Conv2d(3, 4, (5, 3), padding="same"), (2, 3, 9, 8)),
    "valid": (nn.Conv2d(3, 4, 3, padding="valid", bias=False), (2, 3, 9, 8)),
    "padded, in steps": (nn.Conv2d(3, 4, 3, stride=(2, 1), padding=(1, 2)), (2, 3, 9, 8)),
    "with gaps": (nn.Conv2d(3, 4, 3, dilation=(2, 1)), (2, 3, 9, 8)),
    "in groups": (nn.Conv2d(6, 4, 3, groups=2), (2, 6, 9, 8)),
    "of each channel": (nn.Conv1d(6, 6, 4, groups=6, padding=3), (2, 6, 9)),
    "frames": (nn.Conv3d(3, 4, (2, 3, 3), padding=1), (2, 3, 4, 7, 7)),
    "no batch": (nn.Conv2d(3, 4, 3), (3, 9, 8)),
}


@pytest.fixture
def every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the other way for clearly faster, whatever its time."""
    monkeypatch.setattr(slow_calls, "_CLEARLY_FASTER", 0.0)


def noted(function: Any, *given: Any, **options: Any) -> Call:
    calls = Calls()
    with calls:
        function(*given, **options)
    assert len(calls.noted) == 1
    return calls.noted[0]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_compared_with_the_product_that_has_the_same_numbers(name: str) -> None:
    module, shape = CONVOLUTIONS[name]
    call = noted(module, torch.randn(shape))
    other = faster_way(call)
    assert other is not None
    cause, way = other
    assert cause == "convolution"
    expected, found = (each.function(**each.options) for each in (call, way))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wanted, gradient = (
        torch.autograd.grad(output.square().sum(), call.options["weight"])[0] for output in (expected, found)
    )
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


def heads(width: int = 8) -> torch.Tensor:
    return torch.randn(1, 2, 16, width)


def test_attention_with_a_fused_kernel_is_no_trap() -> None:
    assert faster_way(noted(scaled_dot_product_attention, heads(), heads(), heads(), is_causal=True)) is None


def test_what_keeps_attention_from_a_fused_kernel_is_named() -> None:
    dropped = faster_way(noted(scaled_dot_product_attention, heads(), heads(), heads(), dropout_p=0.1))
    wide = faster_way(noted(scaled_dot_product_attention, heads(), heads(), heads(4)))
    assert [other and other[0] for other in (dropped, wide)] == ["dropout", "widths"]


def test_on_a_device_whose_fused_kernels_take_bfloat16_alone_the_type_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = noted(scaled_dot_product_attention, heads(), heads(), heads(), attn_mask=torch.zeros(16, 16))
    choose = torch._fused_sdp_choice

    def of_device(**options: Any) -> int:
        return choose(**options) if options["query"].dtype == torch.bfloat16 else SDPBackend.MATH.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", of_device)
    other = faster_way(call)
    assert other is not None
    assert other[0] == "dtype"
    assert other[1].function(**other[1].options).dtype == torch.bfloat16
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda **_: SDPBackend.MATH.value)
    assert faster_way(call) is None  # no change helps


def calls_of(model: Path, **training: Any) -> tuple[SlowCall, ...]:
    settings = ModelSection(path=str(model), weights="random", dtype="float32")
    return quick_slow_calls(settings, TrainingSection(**training), CPU, has_images=True)


@pytest.mark.usefixtures("every_call")
def test_a_convolution_and_attention_with_dropout_are_found_in_their_layers(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skeleton, "embed_by_matrix", lambda _: None)
    folder = variant_of(example, tmp_path, lambda config: config["text_config"].update(attention_dropout=0.1))
    found = calls_of(folder / "model")
    assert [(kind, cause) for kind, cause, *_ in found] == [
        ("vision_embedding", "convolution"),
        ("language", "dropout"),
    ]
    (_, _, patches, _), (_, _, scores, _) = found
    assert patches[0] > 0
    assert scores[2] > 0


def findings_of(job: Path) -> list[tuple[str, str]]:
    answer = CliRunner().invoke(main, ["doctor", str(job), "--json"])
    assert answer.exit_code == 0, answer.output
    return [(each["what"], each["remedy"]) for each in json.loads(answer.stdout)["findings"]]


def plant(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each Python process that this one starts run the script first."""
    (folder / "sitecustomize.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))


@pytest.mark.usefixtures("home")
def test_the_doctor_tries_layers_in_a_process_that_ends_where_no_profile_is_stored(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = JobFile(example, tmp_path)
    plant(SLOW_CONVOLUTION, tmp_path, monkeypatch)
    (found,) = (what for what, _ in findings_of(job.path) if "of a step" in what)
    assert "a convolution in the patch embedding that is slow here costs" in found
    assert capfd.readouterr().out == ""  # nothing is written past the JSON document


@pytest.mark.usefixtures("home")
def test_the_doctor_says_why_no_layers_could_be_tried(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobFile(example, tmp_path)
    with locked(("cpu",)):
        ((what, remedy),) = findings_of(job.path)
    assert what.startswith("no convolution or attention was tried: another autotune process uses the devices")
    assert remedy == "wait for it, or end it"
    plant("import sys\nsys.exit('CUDA out of memory; 2 MiB are free')", tmp_path, monkeypatch)
    ((what, remedy),) = findings_of(job.path)
    assert what == "no convolution or attention was tried: SystemExit: CUDA out of memory; 2 MiB are free"
    assert remedy == "free the memory of the device, or measure with `autotune profile JOB`"


@pytest.mark.long
@pytest.mark.usefixtures("home")
def test_a_doctor_that_tries_layers_writes_json_alone(example: Path, tmp_path: Path) -> None:
    job = JobFile(example, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "doctor", job.path, "--json"], capture_output=True, check=True
    )
    assert "findings" in json.loads(done.stdout)


@pytest.mark.usefixtures("home")
def test_the_doctor_takes_the_slow_calls_of_a_stored_profile(example: Path, tmp_path: Path) -> None:
    job = JobFile(example, tmp_path)
    work = prepare(load_job(job.path), tmp_path).workload
    slow: SlowCall = ("projector", "convolution", (9.0, 0, 0, 0), (1.0, 0, 0, 0))
    with open_store() as store:
        store.add_workload(work)
        keys = (work.hardware.fingerprint, work.model.fingerprint, work.software)
        sizes = ProfiledSizes(units=24, image_units=0, tokens=1024)
        store.save_layer_profile(*keys, wire.encode(replace(COSTS, slow_calls=(slow,), sizes=sizes)))
    answer = CliRunner().invoke(main, ["doctor", str(job.path), "--json"])
    assert answer.exit_code == 0, answer.output
    assert any("a convolution in the projector" in each["what"] for each in json.loads(answer.stdout)["findings"])
    assert "What is known of the layers is uncertain: the profile is of data without images" in answer.stderr
