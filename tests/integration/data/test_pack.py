"""`autotune pack INPUT`: what it shows, and the packs that it writes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import transformers
from click.testing import CliRunner
from filelock import FileLock

from autotune import job_file
from autotune.cli import main
from autotune.cli.forecast_commands import pack
from autotune.epoch_balance import balance
from autotune.job_file import load_job
from autotune.machine.devices import lock_file
from autotune.model_shape import model_shape
from autotune.packing.balance import balanced
from autotune.packing.material import PackOptions, paper_weights, read_material
from tests.contracts.test_families import TINY
from tests.programs.plots import drawn_texts, overlaps
from tests.programs.users import JobFile, databases, document, refusal
from tests.values.data import record, write_lengths, write_records
from tests.values.parameters import parameters
from trials import plugins
from trials.data.epoch import EpochSettings, build_epoch
from trials.data.indexing import build_index
from trials.data.loader import micro_batches
from trials.data.pack_cost import cost_weights
from trials.job import DataSection
from trials.model.inputs.encoders import load_encoder
from trials.plan import Packed

ASKED = ("--qv", "10", "--qt", "500", "--qv-min", "8", "--qt-min", "400", "--packer", "isf")
PACKING = Packed(qv=10, qt=500, qv_min=8, qt_min=400, packer="isf")

pytestmark = pytest.mark.usefixtures("home")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what it shows ---


def test_lengths_are_measured_before_and_after_with_the_papers_model(lengths: Path) -> None:
    found = document("pack", lengths, "--qv", "10", "--qt", "4096")
    material = read_material(job_file.JobFile(path=lengths), PackOptions())
    assert (found["data_parallel"], found["global_batch_samples"], found["records"], found["bad"]) == (8, 128, 300, 0)
    assert found["packing"] == {**found["packing"], "qv": 10, "qt": 4096, "qv_min": 10, "qt_min": 3968}
    assert found["cost_model"]["unit"] == paper_weights().unit
    before = balance(balanced(material, PackOptions(qv=10, qt=4096)).before.epoch, paper_weights())
    assert found["before"]["dist_ratio_vision"] == before.dist_ratio_vision
    assert found["after"]["cost_per_sample"] < found["before"]["cost_per_sample"]
    assert found["after"]["pad_ratio"] == 0 < found["before"]["pad_ratio"]


def test_the_table_names_choices_metrics_units_oversize_samples_and_bad_lines(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.json", [(1, 100), (2, 5000), (0, -7), (1, 300)] * 8)
    answer = CliRunner().invoke(main, ["pack", str(path), "--qv", "4", "--qt", "800", "--data-parallel", "2"])
    assert answer.exit_code == 0, answer.stderr
    output = answer.stdout
    assert re.search(r"packs of Qv 4, Qt 800 \(Q'v 4, Q't 672; (isf|best-fit|cutting-stock)\): as asked for", output)
    headline, _, table = output.partition("\n\n")
    assert re.search(r"A sample costs [\d.]+% (less|more) than before, by .* waiting .*\.\n`autotune tune JOB`", table)
    assert "\nCompared by forward FLOP of OmniBal's InternViT-6B + InternLM2-20B alone; memory and fixed" in headline
    assert "dist ratio, vision" in output
    assert "of text tokens" in output
    assert "8 of 24 samples are above Qv 4, Qt 800; each has a pack of its own:" in output
    assert f"  {path}:" in output
    assert "2 vision units, 5000 text tokens\n" in output
    assert "  and 3 more" in output
    assert "8 of 32 records cannot be used:" in output


def test_steps_are_compared_with_steps_in_random_order(lengths: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["pack", str(lengths), "--qv", "10", "--qt", "4096"]).stdout
    found = document("pack", lengths, "--qv", "10", "--qt", "4096")
    before, after = (found[side]["variances"] for side in ("before", "after"))
    assert [*before] == [*after]
    assert {"length", "vision units"} <= {*before}
    for name in before:
        row = rf"variance between steps, {name} +over random order +{before[name]:.2f} +{after[name]:.2f}\n"
        assert re.search(row, shown)
    # Samples of one kind are left, which do not differ in what the others differ.
    mixed = write_lengths(tmp_path / "mixed.json", [(0, 100), (5, 300)] * 40)
    asked = ("--qv", "4", "--qt", "200", "--oversize", "skip", "--data-parallel", "2", "--global-batch", "8")
    shown = CliRunner().invoke(main, ["pack", str(mixed), *asked]).stdout
    assert "steps near the global batch" in shown
    assert "variance between steps, images" not in shown


@pytest.mark.parametrize(
    "packer", parameters({name: name for name in ("isf", "best-fit", "cutting-stock")}, short=("best-fit",))
)
def test_packs_are_dealt_to_steps_so_that_these_vary_no_more_than_random_ones(packer: str, tmp_path: Path) -> None:
    """Long samples fill packs alone, so that rows of like packs are steps of long or of short samples."""
    random = np.random.default_rng(0)
    tokens = np.clip(random.lognormal(5, 1.1, 6000), 8, 4000).astype(int).tolist()
    path = write_lengths(tmp_path / "lengths.json", [(0, each) for each in tokens])
    asked = ("--qv", "9", "--qt", "4096", "--data-parallel", "16", "--global-batch", "512")
    after = document("pack", path, *asked, "--packer", packer)["after"]
    assert after["steps_near"] == 1
    assert max(after["variances"].values()) < 2


def test_without_capacities_a_candidate_of_least_cost_is_taken(lengths: Path) -> None:
    material = read_material(job_file.JobFile(path=lengths), PackOptions())
    found = balanced(material, PackOptions(packer="isf"))
    assert "candidates" in found.reason
    for qv, qt in ((3, 1024), (20, 900)):
        other = balanced(material, PackOptions(packer="isf", qv=qv, qt=qt))
        assert found.after.balance.cost_per_sample < other.after.balance.cost_per_sample
    assert found.after.epoch.batch_deviation <= 0.1


def test_of_capacities_that_cost_alike_packs_like_the_unpacked_micro_batch_are_taken(tmp_path: Path) -> None:
    material = read_material(
        job_file.JobFile(path=write_lengths(tmp_path / "lengths.json", [(1, 100)] * 320)), PackOptions()
    )
    found = balanced(material, PackOptions())
    assert found.after.balance.samples_per_pack.mean == 4


def test_one_capacity_can_be_asked_for_alone(lengths: Path) -> None:
    material = read_material(job_file.JobFile(path=lengths), PackOptions())
    by_units = balanced(material, PackOptions(packer="isf", qv=7))
    by_tokens = balanced(material, PackOptions(packer="isf", qt=4001))
    assert (by_units.packing.qv, by_tokens.packing.qt) == (7, 4001)
    # Which no candidate has: what fills packs is said of both capacities.
    assert re.fullmatch(r"best of \d+ candidates.*", by_units.reason)
    assert re.fullmatch(r"best of \d+ candidates", by_tokens.reason)


def test_capacities_of_large_data_are_compared_on_a_part_of_it(lengths: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.packing.balance._TRIED_SAMPLES", 100)
    found = balanced(read_material(job_file.JobFile(path=lengths), PackOptions()), PackOptions(packer="isf"))
    assert found.after.balance.samples == 300
    assert found.after.balance.cost_per_sample < found.before.balance.cost_per_sample


def test_a_job_is_packed_without_devices_and_database(job: JobFile, home: Path) -> None:
    lock = lock_file()
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        found = document("pack", job.spoil(hardware__devices=2), *ASKED)
    settings = load_job(job.path)
    shape = model_shape(settings.model)
    assert (found["data_parallel"], found["global_batch_samples"]) == (2, 8)
    assert found["cost_model"]["name"] == shape.name
    assert [found["cost_model"][name] for name in ("token", "target")] == [shape.token_flops, shape.target_flops]
    assert not databases(home)
    assert not job.output.exists()


def test_options_come_before_the_job(job: JobFile) -> None:
    found = document(
        "pack", job.path, *ASKED, "--data-parallel", "3", "--global-batch", "12", "--seed", "5", "--epoch", "2"
    )
    assert [found[key] for key in ("data_parallel", "global_batch_samples", "seed", "epoch")] == [3, 12, 5, 2]


def test_a_model_that_cannot_be_trained_here_weighs_lengths_roughly(lengths: Path, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("qianfan_ocr").save_pretrained(tmp_path / "qianfan_ocr")
    found = document("pack", lengths, *ASKED, "--model", tmp_path / "qianfan_ocr")
    assert found["cost_model"]["name"] == "qianfan_ocr (roughly, from its parameters)"


def test_omnibals_meta_file_of_lengths_repeats_them(lengths: Path, tmp_path: Path) -> None:
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"a": {"token_lengths": str(lengths), "repeat_time": 2}}))
    found = document("pack", meta, *ASKED)
    assert (found["records"], found["after"]["samples"]) == (300, 600)


def test_another_model_can_weigh_lengths(lengths: Path, example: Path) -> None:
    found = document("pack", lengths, *ASKED, "--model", example / "model")
    assert found["cost_model"]["name"] == "model"
    assert found["cost_model"]["unit"] < paper_weights().unit


def test_lengths_are_cut_to_the_context_of_a_model(tmp_path: Path, example: Path) -> None:
    longest = json.loads((example / "model" / "config.json").read_text())["text_config"]["max_position_embeddings"]
    path, out = write_lengths(tmp_path / "lengths.json", [(1, longest + 100), (1, 100)]), tmp_path / "packs.jsonl"
    wanted = ("--oversize", "truncate", "--model", example / "model", "--data-parallel", "1")
    found = document("pack", path, "--qv", "1", "--qt", "99999", *wanted, "--out", out)
    assert sorted(line["text_tokens"] for line in lines(out)) == [100, longest]
    assert found["cut"] == {"max_tokens": longest, "samples": 1}
    asked = [str(part) for part in ("pack", path, "--qv", "1", "--qt", "99999", *wanted)]
    output = CliRunner().invoke(main, asked).stdout
    assert f"1 of 2 samples has {longest:,} tokens: longer ones were cut to that:\n  {path}:1" in output


def test_samples_above_the_capacities_are_not_called_cut(tmp_path: Path, example: Path) -> None:
    path = write_lengths(tmp_path / "lengths.json", [(1, 100), (2, 1000)] * 8)
    asked = ("--model", str(example / "model"), "--oversize", "truncate", "--qt", "800", "--data-parallel", "2")
    output = CliRunner().invoke(main, ["pack", str(path), *asked]).stdout
    assert re.search(r"8 of 16 samples are above Qv \d+, Qt 800; each has a pack of its own:", output)
    assert "cut" not in output.partition("8 of 16")[2]


@pytest.mark.usefixtures("home")
def test_images_of_another_size_than_recorded_are_reported(job: JobFile, example: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (example / "data" / "train.jsonl").read_text().splitlines()]
    shown = next(record for record in records if isinstance(record.get("image"), str))
    path = write_records(tmp_path / "data.jsonl", {**shown, "width": 7, "height": 7})
    job.spoil(data={"sources": [{"path": str(path), "images": str(example / "data")}]})
    asked = ("--qv", "9", "--qt", "999", "--data-parallel", "1")
    assert document("pack", job.path, *asked)["wrong_sizes"] == 1
    output = CliRunner().invoke(main, ["pack", str(job.path), *asked]).stdout
    assert "1 image has another size than recorded; the size in the file is used" in output


@pytest.mark.usefixtures("devices_in_use")
def test_pack_and_doctor_name_what_a_training_does_not_use(job: JobFile, example: Path, tmp_path: Path) -> None:
    plain, other = map(json.loads, (example / "data" / "train.jsonl").read_text().splitlines()[:2])
    path = write_records(tmp_path / "data.jsonl", {**plain, "source": "shapes"}, {**other, "source": "shapes"})
    job.spoil(data={"sources": [{"path": str(path), "images": str(example / "data")}]})
    metadata = f"the metadata `source`, the first is {path}:1"
    healthy = CliRunner().invoke(main, ["doctor", str(job.path)]).stdout
    assert f"Unused    {metadata}" in healthy
    assert "not used" not in healthy
    write_records(path, {**plain, "source": "shapes"}, {**other, "picture": "b.png"})
    surprise = f"the key `picture`, in 1 record, the first is {path}:2"
    found = CliRunner().invoke(main, ["doctor", str(job.path)]).stdout
    assert f"not used by a training: {surprise}" in " ".join(found.split())
    assert "No problems found" not in found
    output = (
        CliRunner().invoke(main, ["pack", str(job.path), "--qv", "9", "--qt", "999", "--data-parallel", "1"]).stdout
    )
    assert f"Not used by a training:\n  {surprise}\n  {metadata}" in output


@pytest.mark.usefixtures("devices_in_use")
def test_a_question_without_its_video_is_named_with_the_remedy(
    job: JobFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_records(tmp_path / "data.jsonl", record("Why?", "So."), record("<video>Why?", "So.", videos=[]))
    plugins.load(TINY, "qwen2-5-vl").make(tmp_path / "model")
    job.spoil(model__path=str(tmp_path / "model"), data={"sources": [{"path": str(path)}]}, hardware={"devices": 1})
    what = (
        f"robably a mistake: a question with the text <video> and without a video, in 1 record, the first is {path}:2"
    )
    packed = CliRunner().invoke(main, ["pack", str(job.path), "--qv", "9", "--qt", "999"]).stdout
    assert f"P{what}; name the video in the record" in packed
    assert "Not used" not in packed
    checked = CliRunner().invoke(main, ["doctor", str(job.path)]).stdout
    assert f"p{what}" in " ".join(checked.split())
    assert f"p{what}; name the video in the record" in caplog.text


def test_the_choices_for_oversize_are_the_jobs() -> None:
    option = next(parameter for parameter in pack.params if parameter.name == "oversize")
    field = DataSection.model_fields["oversize"].annotation
    assert set(getattr(option.type, "choices", ())) == set(getattr(field, "__args__", ()))


def test_lengths_need_no_torch() -> None:
    code = "import sys, autotune.cli.data; sys.exit('torch' in sys.modules or 'vl_convert' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the packs as a file ---


def test_every_sample_stands_in_one_line_in_order_of_step_rank_and_micro_batch(lengths: Path, tmp_path: Path) -> None:
    out = tmp_path / "packs.jsonl"
    found = document(
        "pack", lengths, "--qv", "9", "--qt", "3000", "--data-parallel", "4", "--global-batch", "64", "--out", out
    )
    packs = lines(out)
    assert found["files"]["packs"] == str(out)
    assert len(packs) == found["after"]["packs"]
    assert sorted(sample for line in packs for sample in line["samples"]) == list(range(300))
    places = [(line["step"], line["rank"], line["micro_batch"]) for line in packs]
    assert places == sorted(set(places))
    rows = json.loads(lengths.read_text())
    for line in packs:
        assert line["vision_units"] == sum(rows[sample]["vit_num"] for sample in line["samples"])
        assert line["text_tokens"] == sum(rows[sample]["token_num"] for sample in line["samples"])


def test_samples_are_counted_over_unusable_records_too(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.json", [(0, -7), (1, 100), (1, 200), (0, -7), (1, 300)])
    out = tmp_path / "packs.jsonl"
    document("pack", path, "--qv", "9", "--qt", "3000", "--data-parallel", "1", "--out", out)
    assert sorted(sample for line in lines(out) for sample in line["samples"]) == [1, 2, 4]


def test_parquet_holds_the_same_lines(lengths: Path, tmp_path: Path) -> None:
    text, table = tmp_path / "packs.jsonl", tmp_path / "packs.parquet"
    for out in (text, table):
        document("pack", lengths, "--qv", "9", "--qt", "3000", "--out", out)
    assert pyarrow.parquet.read_table(table).to_pylist() == lines(text)


@pytest.mark.parametrize("name", ["packs.jsonl", "packs.parquet"])
def test_older_packs_are_replaced_once_new_ones_are_there(lengths: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    document("pack", lengths, "--qv", "9", "--qt", "3000", "--out", out)
    older = out.read_bytes()
    refusal("pack", lengths, "--qv", "1", "--qt", "10", "--oversize", "skip", "--out", out)
    assert out.read_bytes() == older
    document("pack", lengths, "--qv", "9", "--qt", "2000", "--out", out)
    assert out.read_bytes() != older
    assert {path.name for path in tmp_path.iterdir()} == {"lengths.json", name}


def test_the_training_reads_the_packs_of_the_file(job: JobFile, tmp_path: Path) -> None:
    out = tmp_path / "packs.jsonl"
    document("pack", job.spoil(hardware__devices=2), *ASKED, "--out", out)
    settings = load_job(job.path)
    encoder = load_encoder(settings.model, settings.data)
    index, _ = build_index(settings.data, encoder, Path())
    epoch = build_epoch(
        index,
        PACKING,
        EpochSettings(
            global_batch_samples=settings.training.global_batch_samples,
            weights=cost_weights(model_shape(settings.model)),
            seed=settings.training.seed,
            oversize=settings.data.oversize,
        ),
        data_parallel=2,
    )
    tokens = dict(zip(index.record.tolist(), index.text_tokens.tolist(), strict=True))
    output = lines(out)
    for rank in range(2):
        steps = range(epoch.steps)
        batches = list(micro_batches(index, epoch, steps, rank, encoder, pixels=False, workers=0, on_error="fail"))
        of_rank = [line for line in output if line["rank"] == rank]
        assert [len(batch.tokens.input_ids) for batch in batches] == [line["text_tokens"] for line in of_rank]
        for batch, line in zip(batches, of_rank, strict=True):
            assert list(batch.tokens.lengths) == [tokens[sample] for sample in line["samples"]]


# --- the plot ---


@pytest.mark.parametrize(
    ("suffix", "beginning"),
    parameters({".png": (".png", b"\x89PNG"), ".svg": (".svg", b"<svg"), ".pdf": (".pdf", b"%PDF")}, short=(".pdf",)),
)
def test_the_suffix_of_the_file_decides_the_format_of_the_plot(
    lengths: Path, tmp_path: Path, suffix: str, beginning: bytes
) -> None:
    picture = tmp_path / f"balance{suffix}"
    assert document("pack", lengths, *ASKED, "--plot", picture)["files"]["plot"] == str(picture)
    assert picture.read_bytes().startswith(beginning)


def test_text_alone_on_one_rank_can_be_drawn(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "lengths.json", [(0, 100 + number) for number in range(40)])
    picture = tmp_path / "balance.svg"
    found = document("pack", path, "--qv", "0", "--qt", "1000", "--data-parallel", "1", "--plot", picture)
    assert found["after"]["vision_fill"] is None
    assert "Qt = 1000" in picture.read_text()


@pytest.mark.parametrize(
    "capacities",
    parameters(
        {
            "in the middle": (("9", "3000"),),
            "at the lower edges": (("5", "1400"),),
            "at the upper edges": (("40", "9000"),),
            "many tokens": (("9", "200000"),),
            "many units": (("2000", "500"),),
        },
        short=("at the lower edges",),
    ),
)
def test_no_label_of_the_plot_covers_another(lengths: Path, tmp_path: Path, capacities: tuple[str, str]) -> None:
    """Capacities in the middle, at the edges that over-size samples and full packs make, and far beyond all packs."""
    qv, qt = capacities
    picture = tmp_path / "balance.svg"
    document("pack", lengths, "--qv", qv, "--qt", qt, "--data-parallel", "4", "--plot", picture)
    texts = drawn_texts(picture)
    shown = {text for text, *_ in texts}
    assert {f"Qv = {qv}", f"Qt = {qt}", "before", "after", "share of rows", "predicted cost"} <= shown
    assert {"text tokens of a micro-batch", "vision units of a micro-batch", "micro-batches"} <= shown
    assert overlaps(texts) == []
