import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.values.data import record, write_records
from trials import wire
from trials.data import formats
from trials.data.formats import AnnotationFile
from trials.data.records.sample import BadLine, Sample, Video
from trials.errors import DataError
from trials.job import Source
from trials.sampling import taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two annotation files and one of images."""
    (tmp_path / "pictures").mkdir()
    write_records(tmp_path / "a.jsonl", record("a", "b"))
    write_records(tmp_path / "b.jsonl", record("c", "d"))
    return tmp_path


def expand(path: Path, content: object, **source: Any) -> tuple[AnnotationFile, ...]:
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return formats.resolve(Source.model_validate({"path": path.name, **source}), path.parent)


def conversations(file: AnnotationFile) -> list[Any]:
    found = [found for chunk in formats.chunks(file) for _, found in formats.records(file, chunk)]
    return [[turn.text for turn in sample.turns] if isinstance(sample, Sample) else str(sample) for sample in found]


def test_a_folder_of_images_that_is_not_there_is_refused(folder: Path) -> None:
    content = json.dumps(record("a", "b"))
    (found,) = expand(folder / "a.jsonl", content, images="pictures")
    assert found.images == folder / "pictures"
    with pytest.raises(DataError, match="is not a folder"):
        expand(folder / "a.jsonl", content, images="b.jsonl")
    absent = r"images of .*a.jsonl: .*/photos is not a folder; correct it, or create the folder"
    with pytest.raises(DataError, match=absent):
        expand(folder / "a.jsonl", content, images="photos")
    with pytest.raises(DataError, match=absent):
        expand(folder / "meta.json", {"a": {"root": "photos", "annotation": "a.jsonl"}})


# --- InternVL ---


def test_a_meta_file_of_internvl_lists_files_with_their_repeats(folder: Path) -> None:
    meta = {
        "a": {"root": "pictures", "annotation": "a.jsonl", "repeat_time": 0.5, "length": 1, "data_augment": False},
        "b": {"root": str(folder / "pictures"), "annotation": str(folder / "b.jsonl")},
    }
    first, second = expand(folder / "meta.json", meta, repeat=3.0)
    assert first == AnnotationFile(path=folder / "a.jsonl", images=folder / "pictures", format="internvl", repeat=1.5)
    assert (second.path, second.images, second.repeat) == (folder / "b.jsonl", folder / "pictures", 3.0)
    (folder / "data" / "pictures").mkdir(parents=True)
    (other,) = expand(folder / "meta.json", meta, names=["a"], images="data", format="llava")
    assert (other.images, other.format) == (folder / "data" / "pictures", "llava")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"repeat_time": 0}, "`repeat_time` is 0; write a number above 0"),
        ({"repeat_time": True}, "`repeat_time` is True"),
        ({"repeat_time": float("nan")}, "`repeat_time` is nan"),
        ({"annotation": 3}, "`annotation` is 3; write a path relative to the mixture file"),
        ({"root": None}, "`root` is None"),
    ],
)
def test_a_wrong_entry_of_a_meta_file_is_named(folder: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f'meta.json: "shapes": {message}'):
        expand(folder / "meta.json", {"shapes": {"root": "", "annotation": "a.jsonl", **entry}})


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"a": {"annotation": "a.jsonl"}, "b": {"root": "x"}}, '"b": `annotation` is missing'),
        ({"a": {"annotation": "a.jsonl"}, "b": 3}, '"b": expected an object, not 3'),
        ({"a": {"annotation": "no.jsonl"}}, r"no\.jsonl does not exist; correct its path"),
        ({"a": {"annotation": "no\0.jsonl"}}, "cannot be opened"),
        ({"a": {"annotation": "n" * 300}}, r"cannot be opened \(File name too long\)"),
        ('{"a": {"annotation": "a.jsonl"}, "a": {"annotation": "b.jsonl"}}', '"a" is given twice, and one of them'),
    ],
)
def test_nothing_that_a_mixture_lists_is_lost_silently(folder: Path, meta: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        expand(folder / "meta.json", meta)


@pytest.mark.parametrize("around", ["\ufeff{}", "\x0c{}\x0c", "{}\u2028", "\n {} \x85"])
def test_white_space_around_a_mixture_is_ignored(folder: Path, around: str) -> None:
    (file,) = expand(folder / "meta.json", around.replace("{}", '{"a": {"annotation": "a.jsonl"}}'))
    assert file.path == folder / "a.jsonl"


def test_a_meta_file_that_sets_its_own_tiles_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        entry = {"annotation": "a.jsonl", "max_dynamic_patch": 6}
        for _ in range(2):  # as a command does that reads the file again
            expand(folder / "meta.json", {"a": entry, "b": entry})
    (message,) = caplog.messages
    assert "max_dynamic_patch is ignored" in message


# --- keys ---

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "internvl": ("meta.json", {"annotation": "a.jsonl"}),
    "omnibal": ("meta.json", {"token_lengths": "lengths.json"}),
    "qwen": ("registry.json", {"annotation_path": "a.jsonl", "data_path": ""}),
    "llava": ("mix.yaml", {"json_path": "a.jsonl"}),
    "llama_factory": ("dataset_info.json", {"file_name": "a.jsonl", "formatting": "sharegpt"}),
}
UNKNOWN: tuple[tuple[str, Any], ...] = (
    *(("sample_ratio", 0.5), ("sampling_ratio", 2.0), ("weight", 2), ("max_pixels", 1000), ("media_root", "pictures")),
    *(("conv_style", "plain"), ("subset", "x"), ("folder", "x"), ("repeat", 2), ("Repeat_Time", 2), ("\x1b[2J", 1)),
)


def listed(kind: str, folder: Path, /, **keys: Any) -> AnnotationFile:
    """The file of a mixture whose one entry has these keys, too."""
    (folder / "lengths.json").write_text('[{"vit_num": 1, "token_num": 300, "image_flags": 1}]')
    name, entry = MIXTURES[kind]
    values = {**entry, **keys}
    (file,) = expand(folder / name, {"datasets": [values]} if kind == "llava" else {"one": values})
    return file


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_key_of_an_entry_that_is_not_known_is_refused(folder: Path, kind: str) -> None:
    usual = listed(kind, folder)
    assert usual == listed(kind, folder, length=7, name="one", description="circles", weight=None)
    assert listed(kind, folder, repeat_time=3).repeat == 3.0
    for key, value in UNKNOWN:
        with pytest.raises(
            DataError, match=r"is not known, and might change what is trained on; the keys of an entry are"
        ):
            listed(kind, folder, **{key: value})


def test_keys_that_internvl_follows_and_this_does_not_are_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        listed("internvl", folder, data_augment=True, max_dynamic_patch=None)
    (message,) = caplog.messages
    assert message.endswith("meta.json: data_augment is ignored; images are trained on as they are")


def test_a_sampling_rate_of_qwen_is_followed(folder: Path) -> None:
    for rate, sampling in ((0.25, "random:25%"), (1, "all"), (None, "all"), (0.001, "random:0.1%")):
        assert listed("qwen", folder, sampling_rate=rate).sampling == sampling
    for wrong in (2.0, 0, True, "0.5"):
        with pytest.raises(DataError, match=r"`sampling_rate` is .*; write a share above 0 and at most 1"):
            listed("qwen", folder, sampling_rate=wrong)
    registry = {"one": {**MIXTURES["qwen"][1], "sampling_rate": 0.5}}
    with pytest.raises(DataError, match="has the sampling random:50% already"):
        expand(folder / "registry.json", registry, names=["one%50"])


def test_keys_beside_the_list_of_llava_are_refused(folder: Path) -> None:
    entries = {"datasets": [{"json_path": "a.jsonl"}]}
    with pytest.raises(DataError, match=r"mix.yaml: `sampling_strategy` is not known next to datasets; remove it"):
        expand(folder / "mix.yaml", {**entries, "sampling_strategy": "first:1"})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"split": "test"}, "`split` is 'test', but a file is one split"),
        (
            {"columns": {"image": "pics"}},
            "'image' in `columns` is not known with the formatting sharegpt; write messages",
        ),
        ({"columns": {"prompt": "ask"}}, "'prompt' in `columns` is not known with the formatting sharegpt"),
        ({"tags": {"loss_tag": "x"}}, "'loss_tag' in `tags` is not known"),
        ({"formatting": "alpaca", "columns": {"messages": "talk"}}, "'messages' in `columns` is not known with"),
        (
            {"formatting": None, "tags": {"role_tag": "x"}},
            "'role_tag' in `tags` is not known with the formatting alpaca",
        ),
        ({"formatting": ["alpaca"]}, "`formatting` is "),
    ],
)
def test_names_in_a_dataset_info_that_mean_nothing_are_refused(
    folder: Path, entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        listed("llama_factory", folder, **entry)
    null = {"formatting": None, "columns": None, "tags": None, "split": "train", "ranking": False}
    assert listed("llama_factory", folder, **null).path == folder / "a.jsonl"


def test_images_whose_column_is_not_named_are_refused(folder: Path) -> None:
    write_records(folder / "a.jsonl", record("q", "r", images=["a.png"]), record("q", "r", images=None))
    bad, text = conversations(listed("llama_factory", folder))
    assert bad.endswith("`images` is not supported; name the column of the images")
    assert text == ["q", "r"]


# --- OmniBal and Qwen-VL ---


def test_a_meta_file_of_omnibal_lists_length_caches(folder: Path) -> None:
    (folder / "lengths.json").write_text('[{"vit_num": 1, "token_num": 300, "image_flags": 1}]')
    (file,) = expand(folder / "meta.json", {"a": {"token_lengths": "lengths.json"}})
    assert (file.path, file.format, file.container) == (folder / "lengths.json", "lengths", "json-list")


def test_a_registry_of_qwen_lists_files_and_takes_shares_of_them(folder: Path) -> None:
    registry = {
        "a": {"annotation_path": "a.jsonl", "data_path": "pictures"},
        "b%5": {"annotation_path": "b.jsonl", "data_path": ""},
    }
    first, second = expand(folder / "registry.json", registry, names=["a%50", "b%5"])
    assert (first.format, first.images, first.sampling) == ("qwen", folder / "pictures", "random:50%")
    assert (second.path, second.images, second.sampling) == (folder / "b.jsonl", folder, "all")
    with pytest.raises(DataError, match="the sampling is 'random:0%'; write all, exactly:N, first:N"):
        expand(folder / "registry.json", registry, names=["a%0"])
    with pytest.raises(DataError, match='"c" is not listed; `names` of this source can be: a, b%5'):
        expand(folder / "registry.json", registry, names=["c%50"])
    for twice in ["a", "a"], ["a", "a%50"]:
        with pytest.raises(DataError, match='"a" is twice in `names` of this source; name it once, and to show'):
            expand(folder / "registry.json", registry, names=twice)


# --- LLaVA ---

LLAVA = """
datasets:
  - json_path: a.jsonl
    sampling_strategy: all
  - json_path: {folder}/b.jsonl
    sampling_strategy: "{sampling}"
"""


@pytest.mark.parametrize("sampling", ["first:1000", "end:3000", "random:999", "first:25%", "random:0.5%"])
def test_a_yaml_mixture_of_llava_lists_files_with_their_sampling(folder: Path, sampling: str) -> None:
    content = LLAVA.format(folder=folder, sampling=sampling)
    first, second = expand(folder / "mix.yaml", content, images="pictures")
    assert (first.path, first.sampling, first.images) == (folder / "a.jsonl", "all", folder / "pictures")
    assert (second.path, second.sampling, second.format) == (folder / "b.jsonl", sampling, "llava")
    (named,) = expand(folder / "mix.yaml", content, names=["a.jsonl"], sampling="end:5")
    assert named.sampling == "end:5"
    with pytest.raises(DataError, match="and the source has the sampling end:5; keep one"):
        expand(folder / "mix.yaml", content, sampling="end:5")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("datasets:\n  - json_path: a.jsonl\n    sampling_strategy: some\n", "the sampling is 'some'; write all"),
        ("datasets:\n  - json_path: a.jsonl\n  - a\n", '"2": expected an object'),
        ("datasets:\n  - json_path: a.jsonl\n  - json_path: a.jsonl\n", "a.jsonl is listed twice"),
        ("datasets:\n  - json_path: a.jsonl\n    json_path: b.jsonl\n", "line 3: .*given twice"),
        ("datasets: !!python/object/apply:os.system ['touch run']\n", "line 1: .*the tag .*is refused"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\ndatasets: []\n", "by an alias"),
        ("datasets: [\n", "line 2"),
        ("[" * 1000, "too deeply"),
        ("x: " + "y" * (1 << 20), "longer than 1 MiB"),
        ("datasets: \x00", "not a text file"),
        ("datasets: []\n", "is in no format known here"),
        ("- a\n", "is in no format known here"),
    ],
)
def test_a_faulty_yaml_file_is_refused_and_nothing_in_it_is_run(folder: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        expand(folder / "mix.yaml", content)
    assert not (folder / "run").exists()


# --- LLaMA-Factory ---


def test_a_dataset_info_names_columns_and_sides(folder: Path) -> None:
    turns = [{"role": "sys", "text": "s"}, {"role": "me", "text": "<image>q"}, {"role": "it", "text": "r"}]
    write_records(folder / "chat.jsonl", {"talk": turns, "pics": ["a.png"]}, {"talk": turns})
    write_records(folder / "alpaca.jsonl", {"ask": "q", "more": "m", "say": "r", "who": "s"})
    write_records(folder / "plain.jsonl", {"instruction": "q", "input": "m", "output": "r"})
    info = {
        "chat": {
            "file_name": "chat.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "images": "pics", "videos": None},
            "tags": {
                "role_tag": "role",
                "content_tag": "text",
                "user_tag": "me",
                "assistant_tag": "it",
                "system_tag": "sys",
            },
        },
        "alpaca": {
            "file_name": "alpaca.jsonl",
            "num_samples": 7,
            "columns": {"prompt": "ask", "response": "say", "system": "who"},
        },
        "plain": {"file_name": "plain.jsonl"},
        "hub": {"hf_hub_url": "someone/something"},
        "compared": {"file_name": "a.jsonl", "ranking": True},
    }
    chat, alpaca, plain = expand(folder / "dataset_info.json", info, names=["chat", "alpaca", "plain"])
    assert chat.format == "llama-factory"
    good, bad = conversations(chat)
    assert good == ["s", "<image>q", "r"]
    assert "1 <image> but the record names 0 images" in bad
    assert alpaca.sampling == "exactly:7"
    assert conversations(alpaca) == [["s", "q", "r"]]
    assert conversations(plain) == [["q\nm", "r"]]
    listed = (chat, alpaca, plain)
    assert wire.decode(tuple[AnnotationFile, ...], wire.encode(listed, tuple[AnnotationFile, ...])) == listed
    with pytest.raises(DataError, match=r'"hub": `hf_hub_url` is not fetched or run; .* list the entries to use'):
        expand(folder / "dataset_info.json", info)
    with pytest.raises(DataError, match='"compared": preference data is not supported'):
        expand(folder / "dataset_info.json", info, names=["compared"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"formatting": "chatml"}, "`formatting` is 'chatml'; write alpaca, sharegpt or openai"),
        ({"columns": ["messages"]}, "`columns` is .*; write an object of names"),
        ({"tags": {"role_tag": 3}}, "`tags` is"),
        ({"num_samples": -1}, "the sampling is 'exactly:-1'"),
        ({"file_name": None}, "`file_name` is None"),
        ({"script_url": "code.py"}, "`script_url` is not fetched or run"),
    ],
)
def test_a_wrong_entry_of_a_dataset_info_is_named(folder: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        expand(folder / "dataset_info.json", {"a": {"file_name": "a.jsonl", **entry}})


def test_videos_are_those_of_the_named_column(folder: Path) -> None:
    shown = record("<video>q", "r")
    write_records(
        folder / "v.jsonl", {**shown, "clips": ["a.mp4"]}, {**shown, "clips": []}, {**shown, "videos": ["b.mp4"]}
    )
    info = {"v": {"file_name": "v.jsonl", "formatting": "sharegpt", "columns": {"videos": "clips"}}}
    (file,) = expand(folder / "dataset_info.json", info)
    film, text, bad = (found for chunk in formats.chunks(file) for _, found in formats.records(file, chunk))
    assert isinstance(film, Sample)
    assert film.videos == (Video(source=folder / "a.mp4"),)
    assert isinstance(text, Sample)
    assert (text.videos, text.turns[0].text) == ((), "<video>q")
    assert isinstance(bad, BadLine)
    assert bad.reason == "`videos` is not supported; name the column of the videos"


# --- sources ---


def test_names_of_a_file_that_is_no_mixture_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="is no mixture file, so `names` selects nothing in it"):
        formats.resolve(Source(path=Path("a.jsonl"), names=("a",)), folder)


@pytest.mark.parametrize(
    "sampling", ["some", "first:0", "random:101%", "end:", "all:5", "first:5 ", "random:0%", "first:0.0%", "exactly:5%"]
)
def test_a_sampling_that_means_nothing_is_refused(sampling: str) -> None:
    with pytest.raises(ValidationError):
        Source(path=Path("a.jsonl"), sampling=sampling)


@pytest.mark.parametrize(
    ("sampling", "shown", "share"),
    [
        ("all", "0123456789", 1.0),
        ("first:3", "012", 1.0),
        ("end:3", "789", 1.0),
        ("first:25%", "012", 1.0),
        ("end:100", "0123456789", 1.0),
        ("random:3", "0123456789", 0.3),
        ("random:25%", "0123456789", 0.3),
        ("random:100", "0123456789", 1.0),
        ("exactly:3", "0123456789", 0.3),
        ("exactly:25", "0123456789", 2.5),
    ],
)
def test_a_sampling_takes_a_part(sampling: str, shown: str, share: float) -> None:
    part, found = taken(sampling, 10)
    assert ("0123456789"[part], found) == (shown, share)
