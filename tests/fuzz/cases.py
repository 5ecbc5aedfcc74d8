"""One case: a valid file with some faults, determined by kind, seed and number."""

import os
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.entries import Entries
from tests.fuzz.mutations import Files, Special, mutated, sealed
from tests.fuzz.request import Kind
from trials.errors import AutotuneError

_MOST_FAULTS = 4
_PIPED: tuple[Kind, ...] = ("jobs", "plans")
"""Entries for which a shell may pass a pipe, which is then read."""
_SOUND = 10
"""Cases without a fault: at least the number of specimens of a kind."""
_WITH_OPTIONS: tuple[Kind, ...] = ("lengths", "annotations", "profiles")
"""Kinds that are passed with options that may not fit them."""
_SEALED = 0.8
"""Share of the bundles whose checksum is made to fit again."""
_OURS = tuple(f"/{name}/" for name in ("autotune", "storage", "trials"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Kind, seed and number, which determine the files."""

    kind: Kind
    seed: int
    number: int
    left_out: frozenset[int] = frozenset()
    """Faults to leave out, counted from 0, which makes a case smaller."""

    def __str__(self) -> str:
        without = f" without {sorted(self.left_out)}" if self.left_out else ""
        return f"{self.kind} {self.number} of seed {self.seed}{without}"

    def dice(self, what: object) -> Random:
        return Random(f"{self.seed} {self.kind} {self.number} {what}")

    @property
    def faults(self) -> int:
        """Number of faults, including those that are left out. The first cases of each kind have none."""
        return min(self.number // _SOUND, self.dice("faults").choice([1, 1, 1, 2, 2, _MOST_FAULTS]))

    def files(self, specimens: list[Files]) -> tuple[Files, list[str]]:
        """Return the files, and a description of each fault."""
        specials = [each for each in Special if each is not Special.PIPE or self.kind not in _PIPED]
        files, described = specimens[self.number % len(specimens)], []
        for number in range(self.faults):
            if number not in self.left_out:
                files, what = mutated(files, self.dice(number), specials)
                described.append(what)
        if self.kind == "bundles" and self.dice("seal").random() < _SEALED:
            files = {
                name: sealed(content) if isinstance(content, bytes) else content for name, content in files.items()
            }
        return files, described

    def smaller(self) -> Iterator["Case"]:
        """Yield the cases with one fault less."""
        for number in range(self.faults):
            if number not in self.left_out and len(self.left_out) + 1 < self.faults:
                left_out = self.left_out | {number}
                yield Case(kind=self.kind, seed=self.seed, number=self.number, left_out=left_out)


def run_case(case: Case, entries: Entries, specimens: list[Files], folder: Path) -> tuple[str, str]:
    """Return ("taken", ""), ("refused", message), or ("fault", error and its place)."""
    verdict, why = _given(case, entries, specimens, folder)
    if verdict == "refused" and case.faults == 0 and case.kind not in _WITH_OPTIONS:
        return "fault", f"the specimen itself is refused: {why}"
    return verdict, why


def _given(case: Case, entries: Entries, specimens: list[Files], folder: Path) -> tuple[str, str]:
    files, _ = case.files(specimens)
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    write(files, place)
    try:
        taken = entries.of(case.kind)(place, case.dice("entry"))
    except AutotuneError as error:
        return ("refused", str(error)) if str(error).strip() else ("fault", f"{type(error).__name__} says nothing")
    except BaseException as error:  # whatever it is, it would have been a traceback
        return "fault", _where(error)
    return "taken" if taken else "refused", ""


def write(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        match content:
            case bytes():
                path.write_bytes(content)
            case Special.FOLDER:
                path.mkdir()
            case Special.LOOP:
                path.symlink_to(path.name)
            case Special.PIPE:
                os.mkfifo(path)
            case Special.ENDLESS:
                path.symlink_to("/dev/zero")
            case Special.LARGE:
                with path.open("wb") as file:
                    file.truncate(1 << 30)


def _where(error: BaseException) -> str:
    """Return the error and the place in this project's code that it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_ours(frame.filename)]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else "tests"
    message = " ".join(ascii(str(error))[1:-1].split())
    return f"{type(error).__name__} at {at}: {message[:300]}"


def is_ours(file: str) -> bool:
    return "site-packages" not in file and any(part in file for part in _OURS)
