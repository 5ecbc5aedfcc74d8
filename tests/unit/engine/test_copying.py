"""Copies of packs on a simulated device, which notes in what order streams, events and the host act."""

from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch

from trials.engine.copying import CopyStream
from trials.engine.stopwatch import Stopwatch
from trials.model.ends.head_loss import targets_of

CUDA = torch.device("cuda", 0)


@dataclass(slots=True, kw_only=True)
class Device:
    """What `torch.cuda` offers of streams and events."""

    notes: list[str] = field(default_factory=list)
    streams: list["Stream"] = field(default_factory=list)
    events: int = 0

    @property
    def current(self) -> "Stream":
        return self.streams[-1]


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: "Stream") -> None:
        self.device.notes.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.device.streams.append(self)

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.device.streams.pop()


class Event:
    def __init__(self, device: Device) -> None:
        device.events += 1
        self.device, self.number = device, device.events

    def record(self, stream: Stream | None = None) -> None:
        self.device.notes.append(f"event {self.number} on {(stream or self.device.current).name}")

    def synchronize(self) -> None:
        self.device.notes.append(f"host waits for event {self.number}")

    def elapsed_time(self, last: "Event") -> float:
        return 1000.0 * (last.number - self.number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device()
    simulated.streams.append(Stream(simulated, "computing"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(simulated, "copies"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: simulated.current)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: Event(simulated))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("waits for the whole device"))
    return simulated


def copies(device: Device, pack: str) -> Any:
    """What copies the pixels and labels of a pack; its tokens stay on the host."""

    def tensor(name: str) -> SimpleNamespace:
        device.notes.append(f"copy {name} on {device.current.name}")
        return SimpleNamespace(
            device=CUDA, record_stream=lambda stream: device.notes.append(f"{stream.name} keeps {name}")
        )

    def copy() -> Any:
        return (tensor(f"pixels {pack}"), torch.zeros(1)), (tensor(f"labels {pack}"), torch.zeros(()))

    return copy


def test_a_pack_is_copied_beside_the_computation_which_waits_for_its_copy(device: Device) -> None:
    CopyStream(CUDA).copied(copies(device, "A"))
    assert device.notes == [
        "copy pixels A on copies",
        "copy labels A on copies",
        "computing waits for copies",
        "computing keeps pixels A",
        "computing keeps labels A",
        "event 1 on computing",
    ]


def test_the_host_runs_ahead_by_one_pack(device: Device) -> None:
    stream = CopyStream(CUDA)
    for pack in "ABC":
        stream.copied(copies(device, pack))
        device.notes.append(f"launch {pack}")
    order = [note for note in device.notes if "keeps" not in note and "labels" not in note]
    assert order == [
        "copy pixels A on copies", "computing waits for copies", "event 1 on computing", "launch A",
        "host waits for event 1", "copy pixels B on copies", "computing waits for copies", "event 2 on computing",
        "launch B",
        "host waits for event 2", "copy pixels C on copies", "computing waits for copies", "event 3 on computing",
        "launch C",
    ]  # fmt: skip


def test_on_a_cpu_tensors_are_taken_as_they_are(device: Device) -> None:
    targets = targets_of(torch.zeros(1, dtype=torch.long), torch.ones(()))
    given = ((torch.zeros(1), torch.zeros(1)), targets)
    assert CopyStream(torch.device("cpu")).copied(lambda: given) is given
    assert not device.notes


def test_times_of_sections_are_those_between_their_events(device: Device) -> None:
    stopwatch = Stopwatch(CUDA)
    with stopwatch.section("forward"), stopwatch.section("inner"):
        pass
    with stopwatch.section("forward"):
        pass
    assert not any("host" in note for note in device.notes)
    assert stopwatch.read() == {"inner": 1.0, "forward": 2.0}
    assert [note for note in device.notes if "host" in note] == ["host waits for event 6"]
