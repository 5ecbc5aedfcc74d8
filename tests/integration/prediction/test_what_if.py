"""`autotune pack JOB --what-if`: the data of a job under other settings of images, videos and the cutoff."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from autotune import predict, what_if
from autotune.cli import main
from autotune.errors import PackError
from autotune.forecast.forecast import ForecastData
from autotune.job_file import load_job
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled
from tests.contracts.test_families import TINY
from tests.programs.users import JobFile, databases, document, refusal
from tests.values.data import record, write_records
from tests.values.forecast import OTHERS, Trials, store_profile
from trials import plugins
from trials.costs.layer_costs import LayerCosts
from trials.data.indexing import build_index
from trials.model.inputs.encoders import load_measurer

pytestmark = pytest.mark.usefixtures("home")


def measured(job_path: Path, model: Path) -> dict[str, int]:
    """Return the sums of lengths, as a job with this model measures its data."""
    job = load_job(job_path)
    changed = job.model.model_copy(update={"path": str(model)})
    index, _ = build_index(job.data, load_measurer(changed, job.data), Path())
    names = ("text_tokens", "vision_units", "target_tokens")
    return {"samples": len(index), **{name: int(getattr(index, name).sum()) for name in names}}


def changed_model(source: Path, folder: Path, file: str, **settings: Any) -> Path:
    """Return a copy of a model with other settings of a processor."""
    shutil.copytree(source, folder)
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **settings}))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Qwen2.5-VL, and samples with an image, with a video, and with text alone."""
    folder, noise = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    plugins.load(TINY, "qwen2-5-vl").make(folder / "model")
    Image.fromarray(noise.integers(0, 256, (60, 90, 3), dtype=np.uint8)).save(folder / "still.png")
    with av.open(folder / "film.mp4", "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height = 48, 32
        for _ in range(24):
            frame = av.VideoFrame.from_ndarray(noise.integers(0, 256, (32, 48, 3), dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    data = write_records(
        folder / "train.jsonl",
        record("<image>\nWhat?", "A red circle.", image="still.png"),
        record("<video>\nWhat is red?", "A circle.", video="film.mp4"),
        record("What is in the picture?", "Nothing."),
    )
    return folder / "model", data


@pytest.fixture
def watching(job: JobFile, pictures: tuple[Path, Path]) -> JobFile:
    model, data = pictures
    job.spoil(model__path=str(model), data__sources=[{"path": str(data)}], hardware={"devices": 1})
    return job


def test_other_tiles_and_a_cutoff_are_those_of_a_model_and_a_job_that_are_set_so(job: JobFile, tmp_path: Path) -> None:
    here = document("pack", job.path, "--what-if", "max_tiles=1", "--what-if", "max_tiles=2,cutoff=40")
    now, one, two = here["variants"]
    model = Path(load_job(job.path).model.path)
    assert {name: now[name] for name in measured(job.path, model)} == measured(job.path, model)
    single = changed_model(model, tmp_path / "single", "preprocessor_config.json", max_patches=1)
    assert {name: one[name] for name in measured(job.path, single)} == measured(job.path, single)
    assert one["vision_units"] < now["vision_units"]
    assert one["operations"] < now["operations"]
    double = changed_model(model, tmp_path / "double", "preprocessor_config.json", max_patches=2)
    job.spoil(data={**load_job(job.path).data.model_dump(mode="json"), "oversize": "truncate", "max_tokens": 40})
    assert {name: two[name] for name in measured(job.path, double)} == measured(job.path, double)
    assert two["lost"] == now["samples"] - two["samples"] > 0  # those whose images the cutoff would cut
    assert two["cut"] > 0
    assert two["settings"] == {"max_tiles": 2, "cutoff": 40}
    assert {each["epoch_seconds"] for each in here["variants"]} == {None}
    assert databases(tmp_path) == []


def test_records_that_are_held_out_are_not_lost_and_are_those_of_the_job(job: JobFile) -> None:
    job.spoil(evaluation={"samples": 0.3}, hardware={"devices": 1})
    now, then = what_if(job.path, {"cutoff": 80}).variants
    loaded = load_job(job.path)
    cut = loaded.data.model_copy(update={"oversize": "truncate", "max_tokens": 80})
    usable, _ = build_index(cut, load_measurer(loaded.model, cut), Path())
    expected = np.setdiff1d(now.index.record, usable.record)
    assert then.lost == len(expected) > 0
    assert then.index.record.tolist() == np.setdiff1d(now.index.record, expected).tolist()


def test_the_samples_of_an_epoch_are_as_many_as_their_file_repeats_them(watching: JobFile) -> None:
    (source,) = load_job(watching.path).data.sources
    watching.spoil(data__sources=[{"path": str(source.path), "repeat": 3}])
    now, then = document("pack", watching.path, "--what-if", "frames=4")["variants"]
    assert (now["samples"], then["samples"]) == (9, 9)
    answer = CliRunner().invoke(main, ["pack", str(watching.path), "--what-if", "frames=4"])
    assert re.search(r"samples +of an epoch +9 +9\n", answer.stdout.replace(" \n", "\n")), answer.stdout
    assert re.search(r"text tokens +of an epoch  ", answer.stdout), answer.stdout
    watching.spoil(data__sources=[{"path": str(source.path), "repeat": 0.5}])  # a random half, which the seed chooses
    answer = CliRunner().invoke(main, ["pack", str(watching.path), "--what-if", "frames=4"])
    assert re.search(r"text tokens +of an epoch, about  ", answer.stdout), answer.output


@pytest.mark.parametrize(
    ("setting", "file", "changes"),
    [
        ("max_pixels=980", "preprocessor_config.json", {"size": {"shortest_edge": 196, "longest_edge": 980}}),
        pytest.param(
            *("min_pixels=7000", "preprocessor_config.json", {"size": {"shortest_edge": 7000, "longest_edge": 7840}}),
            marks=pytest.mark.long,
        ),
        ("frames=4", "video_preprocessor_config.json", {"num_frames": 4}),
        pytest.param("fps=1", "video_preprocessor_config.json", {"fps": 1}, marks=pytest.mark.long),
    ],
)
def test_pixels_and_frames_are_those_of_a_model_that_is_set_so(
    setting: str, file: str, changes: dict[str, Any], watching: JobFile, tmp_path: Path
) -> None:
    model = Path(load_job(watching.path).model.path)
    expected = measured(watching.path, changed_model(model, tmp_path / "other", file, **changes))
    now, then = document("pack", watching.path, "--what-if", setting)["variants"]
    assert {name: then[name] for name in expected} == expected
    assert then["vision_units"] != now["vision_units"]


@pytest.fixture
def unset(watching: JobFile, tmp_path: Path) -> Path:
    """The model folder of `watching` as Qwen publishes it: settings of images alone."""
    model = Path(shutil.copytree(load_job(watching.path).model.path, tmp_path / "unset"))
    (model / "video_preprocessor_config.json").unlink()
    watching.spoil(model__path=str(model))
    return model


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("fps=1", {"fps": 1}),
        pytest.param("max_frames=4", {"max_frames": 4}, marks=pytest.mark.long),
        ("min_frames=8", {"min_frames": 8}),
        ("video_max_pixels=980", {"size": {"shortest_edge": 196, "longest_edge": 980}}),
        pytest.param(
            "video_min_pixels=7000", {"size": {"shortest_edge": 7000, "longest_edge": 7840}}, marks=pytest.mark.long
        ),
    ],
)
def test_settings_of_videos_change_also_where_the_folder_has_those_of_images_alone(
    setting: str, changes: dict[str, Any], watching: JobFile, unset: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(unset, tmp_path / "other"))
    settings = json.loads((unset / "preprocessor_config.json").read_bytes()) | changes
    (changed / "video_preprocessor_config.json").write_text(json.dumps(settings))
    expected = measured(watching.path, changed)
    now, then = document("pack", watching.path, "--what-if", setting)["variants"]
    assert {name: then[name] for name in expected} == expected
    assert then["vision_units"] != now["vision_units"]


def test_a_bound_of_videos_counts_under_its_older_name_too(watching: JobFile, unset: Path) -> None:
    file = unset / "preprocessor_config.json"
    settings = json.loads(file.read_bytes())
    del settings["size"]
    file.write_text(json.dumps(settings | {"min_pixels": 196, "max_pixels": 7840}))
    now, videos, both = (
        each.index.vision_units.tolist()
        for each in what_if(watching.path, {"video_max_pixels": 980}, {"max_pixels": 980}).variants
    )
    assert [then < before for then, before in zip(videos, now, strict=True)] == [False, True, False]
    assert [then < before for then, before in zip(both, now, strict=True)] == [True, True, False]


def test_what_does_not_count_for_videos_is_refused(watching: JobFile, unset: Path) -> None:
    refused = {
        "fps=2": "fps=2 changes nothing: the processors of .* have it already",
        "max_frames=768": "max_frames=768 changes nothing: the processors of .* have it already",
        "fps=1,frames=8": "fps=1 changes nothing, as frames=8 takes precedence; leave it out",
        "frames=1000": "frames=1000 cannot be followed: .*num_frames for videos is 1000; correct it",
    }
    for setting, message in refused.items():
        code, error = refusal("pack", watching.path, "--what-if", setting)
        assert code == 2
        assert re.search(message, error), error
    (unset / "video_preprocessor_config.json").write_text('{"patch_size": 7, "num_frames": 8}')
    error = refusal("pack", watching.path, "--what-if", "fps=1")[1]
    assert "fps=1 changes nothing, as num_frames: 8 of the model takes precedence" in error


def test_the_settings_that_are_named_are_those_that_the_model_reads(job: JobFile, tmp_path: Path) -> None:
    plugins.load(TINY, "glm4v").make(tmp_path / "model")
    job.spoil(model__path=str(tmp_path / "model"))
    for setting in ("frames=4", "max_frames=4", "max_tiles=1"):
        code, error = refusal("pack", job.path, "--what-if", setting)
        assert code == 2
        named = "max_pixels, min_pixels, fps, video_max_pixels, video_min_pixels, cutoff"
        assert f"have no such setting; give one of {named}\n" in error + "\n", error


def test_lost_samples_are_named_with_the_reason(watching: JobFile) -> None:
    then = document("pack", watching.path, "--what-if", "cutoff=46")["variants"][1]
    assert then["lost"] == 1
    (line,) = then["lost_lines"]
    assert re.search(r"train\.jsonl:1: no target token in the first 46 that it is cut to", line), line
    answer = CliRunner().invoke(main, ["pack", str(watching.path), "--what-if", "cutoff=46"])
    assert f"Lost with cutoff=46, 1 record:\n  {line}\n" in answer.stdout, answer.output


def test_operations_are_those_of_all_packs_without_the_waiting_of_ranks(job: JobFile) -> None:
    job.spoil(hardware={"devices": 4})
    variants = what_if(job.path, {"max_tiles": 1}).variants
    for each in variants:
        epoch, balance = each.packs.after.epoch, each.packs.after.balance
        assert each.operations == pytest.approx(epoch.pack_sizes().cost(epoch.settings.weights).sum())
        assert each.operations < balance.cost_per_sample * balance.samples
    job.spoil(training__freeze=["vision"])
    frozen = what_if(job.path, {"max_tiles": 1}).variants
    # All parts run forward, whatever trains; packs of text alone carry a stand-in.
    assert [each.operations for each in frozen] == pytest.approx([each.operations for each in variants], rel=0.01)


def test_with_a_profile_the_best_plans_are_forecast_and_the_largest_samples_named(
    job: JobFile, costs: LayerCosts
) -> None:
    store_profile(job, costs)
    found = what_if(job.path, {"max_tiles": 1}, "cutoff=40")
    now, one, cut = found.variants
    assert found.unknown is None
    assert now.forecast is not None
    assert one.forecast is not None
    assert one.forecast.prediction.epoch_seconds < now.forecast.prediction.epoch_seconds
    index = now.index
    packing = now.packs.packing
    filled = np.maximum(index.vision_units / packing.qv, index.text_tokens / packing.qt)
    assert len(found.largest) == 10
    assert filled[found.largest].tolist() == sorted(filled, reverse=True)[:10]
    assert cut.index.text_tokens.max() == 40
    answer = CliRunner().invoke(main, ["pack", str(job.path), "--what-if", "max_tiles=1", "--what-if", "cutoff=40"])
    assert answer.exit_code == 0, answer.stderr
    assert re.search(r"time of an epoch +predicted +\S+ s +\S+ s \(0\.\d\dx\)", answer.stdout), answer.stdout
    assert "Best plans, from the profile of the layers:\n  now: pipeline" in answer.stdout
    first = int(found.largest[0])
    shown = f"{index.vision_units[first]} + {index.text_tokens[first]}"
    assert re.search(rf"{re.escape(index.where(first))} +{re.escape(shown)} ", answer.stdout), answer.stdout


@pytest.mark.parametrize(
    ("database", "reason"),
    [
        pytest.param(None, "no profile of the layers is stored", marks=pytest.mark.long),
        ("missing.db", "the database sqlite:"),
    ],
)
def test_without_a_profile_the_reason_is_shown(database: str | None, reason: str, job: JobFile, tmp_path: Path) -> None:
    options = ["--db", f"sqlite:///{tmp_path / database}"] if database else []
    answer = CliRunner().invoke(main, ["pack", str(job.path), "--what-if", "cutoff=60", *options])
    assert answer.exit_code == 0, answer.stderr
    assert f"Seconds and bytes are unknown: {reason}" in answer.stdout
    assert "time of an epoch" not in answer.stdout
    assert databases(tmp_path) == []


REFUSED = (
    (["max_pixel=2"], r"'max_pixel' is no setting; give NAME=VALUE with one of max_pixels, .*, cutoff"),
    (["cutoff"], r"cutoff is '' and has to be a whole number; give cutoff=2, say"),
    (["cutoff=1.5"], r"cutoff is '1.5' and has to be a whole number"),
    (["cutoff=many"], r"cutoff is 'many' and has to be a whole number"),
    (["cutoff=0"], r"cutoff is 0 and has to be above 0"),
    (["cutoff=30,cutoff=40"], r"cutoff is given twice; compare its values as two variants"),
    (["max_pixels=980"], r"max_pixels: the processors of .* have no such setting; give one of max_tiles, cutoff"),
    (["cutoff=1000"], r"cutoff=1000 changes nothing: no sample has more than \d+ tokens; leave it out, or lower it"),
    (["max_tiles=5000"], r"max_tiles=5000 cannot be followed: "),
    (["cutoff=40", "--out", "packs.jsonl"], r"--what-if compares and writes no file; leave --out and --plot out"),
    *(
        (["cutoff=40", *option], r"plans, which choose their own packs; leave the options of packs out, and set train")
        for option in (["--global-batch", "4"], ["--data-parallel", "1"], ["--epoch", "1"], ["--oversize", "skip"])
    ),
)


def test_what_cannot_be_compared_is_refused_with_the_reason(job: JobFile) -> None:
    for options, message in REFUSED:
        code, error = refusal("pack", job.path, "--what-if", *options)
        assert code == 2
        assert re.search(message, error), error
    model = Path(load_job(job.path).model.path)
    tiles = json.loads((model / "preprocessor_config.json").read_bytes())["max_patches"]
    code, error = refusal("pack", job.path, "--what-if", f"max_tiles={tiles}")
    assert code == 2
    assert re.search(rf"max_tiles={tiles} changes nothing: the processors of .* have it already, or do not read", error)


def test_resolutions_of_crops_are_changed_in_a_copy_of_the_model(
    job: JobFile, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    plugins.load(TINY, "llava-onevision").make(model)
    job.spoil(model__path=str(model), data__sources=[{"path": str(pictures[1])}])
    for setting in ("max_tiles=1", "max_pixels=980"):
        code, error = refusal("pack", job.path, "--what-if", setting)
        assert code == 2
        assert "have no such setting; give one of frames, fps, cutoff. Its images are cut by image_grid_pin" in error
    assert "image_grid" not in refusal("pack", job.path, "--what-if", "cutoff=1000")[1]
    named = re.findall(r"change it in (\S+) and (\S+) of a copy", error)
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    for file in named[0]:
        settings = {**json.loads((model / file).read_bytes()), "image_grid_pinpoints": [[30, 30]]}
        (copy / file).write_text(json.dumps(settings))
    assert measured(job.path, copy)["vision_units"] < measured(job.path, model)["vision_units"]
    assert document("pack", job.path, "--set", f"model.path={copy}")["after"]["samples"] == 3


def test_lengths_without_a_model_have_no_settings(lengths_file: Path) -> None:
    code, error = refusal("pack", lengths_file, "--what-if", "cutoff=40")
    assert code == 2
    assert "give a job file" in error


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([{"vit_num": 1, "token_num": 100}]))
    return path


def test_the_library_refuses_what_the_command_does(job: JobFile) -> None:
    with pytest.raises(PackError, match="'tiles' is no setting"):
        what_if(job.path, {"tiles": 1})
    with pytest.raises(PackError, match=r"cutoff is 40\.5 and has to be a whole number"):
        what_if(job.path, {"cutoff": 40.5})
    with pytest.raises(PackError, match="settings are a mapping or a text with NAME=VALUE, not 40"):
        what_if(job.path, 40)  # type: ignore[arg-type]


def test_settings_that_only_work_together_are_compared(watching: JobFile) -> None:
    code, error = refusal("pack", watching.path, "--what-if", "min_pixels=9000")
    assert code == 2
    assert "min_pixels=9000 cannot be followed: size of the image processor is" in error
    now, then = document("pack", watching.path, "--what-if", "min_pixels=9000,max_pixels=12000")["variants"]
    assert then["vision_units"] > now["vision_units"]


def test_trials_correct_the_layers_and_not_the_change_of_the_data(
    job: JobFile, costs: LayerCosts, trials: Trials
) -> None:
    truth = scaled(costs, [{"vision": 1.5, "language": 1.3}.get(name, 1.0) for name in FACTORS])

    def seconds() -> list[float]:
        forecasts = (variant.forecast for variant in what_if(job.path, {"max_tiles": 1}).variants)
        return [forecast.prediction.epoch_seconds for forecast in forecasts if forecast]

    store_profile(job, truth)
    real = seconds()
    store_profile(job, costs)
    trials.keep(OTHERS, truth)
    assert real[1] < 0.8 * real[0]
    assert seconds() == pytest.approx(real, rel=0.03)


def test_how_far_a_plan_is_from_its_prediction_does_not_count_as_a_change_of_the_data(
    job: JobFile, costs: LayerCosts, trials: Trials
) -> None:
    store_profile(job, costs)
    (best,) = predict(job.path, top=1)
    trials.keep((best.plan, *OTHERS), costs, factor_of=lambda plan: 0.7 if plan == best.plan else 1.0)
    longest = ForecastData.of(load_job(job.path)).index.text_tokens.max()
    found = what_if(job.path, {"cutoff": int(longest) - 1})
    now, then = (variant.forecast for variant in found.variants)
    assert found.trials == 1 + len(OTHERS)
    assert now is not None
    assert then is not None
    assert (now.plan.layout, now.plan.stages) == (then.plan.layout, then.plan.stages)
    assert now.prediction.epoch_seconds == pytest.approx(then.prediction.epoch_seconds, rel=0.02)
