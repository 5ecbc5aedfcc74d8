"""What a certificate rests on besides the job: the code, the libraries, and the files of the model and the data."""

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import PIL

import trials
from autotune import certification
from autotune.workload import Prepared
from trials.data.index import DatasetIndex
from trials.data.records.sample import Sample
from trials.data.source_code import code_digest
from trials.errors import DataError
from trials.model.weights import weights_fingerprint

_LIBRARIES = ("numpy", "peft", "safetensors", "tokenizers")
"""Those that make samples, adapters and files of weights, besides Pillow, which has several packages; `Software` has
the others."""
_READ = {".jinja", ".json", ".model", ".tiktoken", ".txt"}
"""Ends of the files from which transformers makes a configuration, a tokenizer, a processor and a template."""
# A choice: to look at more takes seconds on a file system of a network, and who changes images changes most of them.
_RECORDS = 64
"""Records, spread evenly over the data, whose files are looked at."""


def has_known_files(prepared: Prepared) -> bool:
    """Return whether the model is a folder without code of its own, which may come from anywhere."""
    model = prepared.job.model
    return not model.trust_remote_code and Path(model.path).is_dir()


def origin_digest(prepared: Prepared) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over all that the results of a plan come from besides the job.

    Annotation files, images and videos count by size and time, weights as in `weights_fingerprint`.
    """
    settings = prepared.job.model
    model = Path(settings.path)
    digest = hashlib.sha256(code_digest(trials, certification).encode())
    digest.update(" ".join((PIL.__version__, *map(version, _LIBRARIES))).encode())
    for file in sorted((*model.glob("*"), *model.glob("*/*.jinja"))):
        if file.suffix in _READ and file.is_file():
            digest.update(f"{file.relative_to(model)}\n".encode() + file.read_bytes())
    if settings.weights == "pretrained":
        digest.update(weights_fingerprint(model).encode())
    for file in _data_files(prepared.index):
        digest.update(f"{file} {_size_and_time(file)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _data_files(index: DatasetIndex) -> Iterator[Path]:
    yield from (file.path for file in index.files)
    for row in np.unique(np.linspace(0, len(index) - 1, _RECORDS, dtype=np.int64)):
        try:
            yield from _media(index.sample(int(row)))
        except DataError:  # of lengths alone, or no longer there
            continue


def _media(sample: Sample) -> Iterator[Path]:
    """Yield the files of a sample; what stands in the record itself is a part of the annotation file."""
    for each in (*sample.images, *(video.source for video in sample.videos)):
        yield from (one for one in (each if isinstance(each, tuple) else (each,)) if isinstance(one, Path))


def _size_and_time(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
