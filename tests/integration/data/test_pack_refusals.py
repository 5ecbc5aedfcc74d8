"""Files and options that `autotune pack INPUT` refuses."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.programs.users import JobFile, refusal

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.yaml"], "gone.yaml: no such file; give a job file or lengths"),
        (["."], ".: is a folder; give a job file or lengths"),
        (["a.csv"], "a.csv: .csv is not a supported kind of file; give one of .yaml, .yml, .json, .jsonl"),
        (["LENGTHS", "--qv", "-1"], "-1 is not in the range 0<=x<="),
        (["LENGTHS", "--qt", "0"], "0 is not in the range 1<=x<="),
        (["LENGTHS", "--data-parallel", "0"], "0 is not in the range 1<=x<="),
        (["LENGTHS", "--data-parallel", "100000000000"], "100000000000 is not in the range"),
        (["LENGTHS", "--qt", "9223372036854775808"], "9223372036854775808 is not in the range"),
        (["LENGTHS", "--seed", "-1"], "-1 is not in the range"),
        (["LENGTHS", "--oversize", "drop"], "'drop' is not one of"),
        (
            ["LENGTHS", "--packer", "nope"],
            "--packer nope is not one of the packers here: best, best-fit, ",
        ),
        (
            ["LENGTHS", "--qv", "4", "--qt", "90", "--qt-min", "99"],
            "--qt-min 99 is above --qt 90; lower the first",
        ),
        (["LENGTHS", "--oversize", "truncate"], "cuts to the model's context length; name one with --model"),
        (["LENGTHS", "--out", "packs.csv"], "packs.csv: a file of this kind cannot be written; give a name that ends"),
        (["LENGTHS", "--out", "gone/packs.jsonl"], "gone/packs.jsonl cannot be written (No such file or directory)"),
        (["LENGTHS", "--out", "folder.jsonl"], "folder.jsonl cannot be written (it is a folder); name a file in it"),
        (["LENGTHS", "--plot", "plot.gif"], "give a name that ends in .svg or .png or .pdf"),
        (["LENGTHS", "--plot", "/proc/plot.png"], "/proc/plot.png cannot be written ("),
        (["JOB", "--model", "model"], "--model applies only to a file of lengths; "),
        (
            ["LENGTHS", "--qv", "50", "--qt", "20000", "--data-parallel", "200"],
            "200 data-parallel ranks are more than the ",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_exits_with_2(
    job: JobFile, lengths: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(lengths.parent)
    Path("a.csv").touch()
    Path("folder.jsonl").mkdir()
    places = {"LENGTHS": str(lengths), "JOB": str(job.path)}
    code, reported = refusal("pack", *(places.get(argument, argument) for argument in arguments))
    assert code == 2
    assert message in reported
    assert not list(lengths.parent.glob("*partial*"))


CONVERSATION = {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]}


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (
            None,
            2,
            'is empty; give [{"vit_num": 5, "token_num": 1341}, ...], OmniBal\'s meta file of such files, or a job',
        ),
        ([], 2, "is empty; give "),
        ({}, 2, '; give [{"vit_num": 5, "token_num": 1341}, ...]'),
        ([{"id": 1}], 2, "is in no format known here (its first record has id); give "),
        ([CONVERSATION], 2, "holds conversations (llava), whose lengths depend on the model; give a job file"),
        ({"a": {"token_lengths": "gone.json"}}, 2, "gone.json does not exist; give "),
        ([{"vit_num": -1, "token_num": 10}], 1, "lengths.json:1:2: `vit_num` is -1; expected a whole number"),
    ],
)
def test_a_file_without_lengths_is_refused(tmp_path: Path, content: object, code: int, message: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("" if content is None else json.dumps(content))
    found, reported = refusal("pack", path)
    assert found == code
    assert str(tmp_path) in reported
    assert message in reported


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("skip", "every sample is above qv=9 qt=40 and skipped; raise them"),
        ("fail", "are above the pack's qv=9 qt=40, as in 300 samples; raise the capacities"),
    ],
)
def test_capacities_below_every_sample_are_refused(lengths: Path, rule: str, message: str) -> None:
    code, reported = refusal("pack", lengths, "--qv", "9", "--qt", "40", "--oversize", rule)
    assert code == 1
    assert message in reported


@pytest.mark.parametrize(
    ("module", "option", "package"),
    [
        ("vl_convert", ("--plot", "plot.png"), "vl-convert-python"),
        ("pyarrow.parquet", ("--out", "packs.parquet"), "pyarrow"),
    ],
)
def test_a_library_that_is_not_installed_is_reported_first(
    lengths: Path, monkeypatch: pytest.MonkeyPatch, module: str, option: tuple[str, str], package: str
) -> None:
    monkeypatch.chdir(lengths.parent)
    monkeypatch.setitem(sys.modules, module, None)
    code, reported = refusal("pack", lengths, *option)
    assert code == 2
    assert f"pip install {package}" in reported


def test_an_input_is_not_overwritten(job: JobFile, example: Path, lengths: Path, tmp_path: Path) -> None:
    shutil.copytree(example / "data", tmp_path / "data")
    data = tmp_path / "data" / "train.jsonl"
    job.spoil(data__sources=[{"path": str(data)}])
    copy = shutil.copy(lengths, tmp_path / "copy.jsonl")
    for source, out in ((job.path, data), (copy, tmp_path / "data" / ".." / "copy.jsonl")):
        content = out.read_bytes()
        code, output = refusal("pack", source, "--qv", "9", "--qt", "3000", "--out", out)
        assert (code, out.read_bytes()) == (2, content)
        assert "exists and is not an earlier output of this kind, so it is not overwritten; remove it" in output
