"""Valid files of every kind, written by the program and its example."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from autotune.forecast.profile_file import ProfiledCosts
from autotune.job_file import load_job
from autotune.search.sampling.proposals import database
from autotune.workload import Prepared, prepare
from storage.records import LaunchResult
from storage.spool import Spool
from storage.store import Store, open_store
from tests.fuzz.mutations import Files
from tests.values.search import COSTS
from tests.values.storage import NOON, OUTCOMES, best_of, concluded, result_of, slow_window, window_of
from tests.values.training import plan_of, variant_of
from trials import wire
from trials.job import Job
from trials.model.skeleton import build_skeleton, load_config
from trials.plan import Packed, Plan
from trials.tasks.training.progress import Progress

JOB, MODEL, DATA, PLAN, PROFILE = "job.yaml", "model", "data", "plan.json", "profile.json"
_EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-internvl"
_SAMPLES = 24
_LENGTHS = [{"vit_num": 1 + n % 6, "token_num": 40 + 31 * n % 900, "image_flags": int(n % 9 > 0)} for n in range(30)]
_RECORDS: tuple[dict[str, Any], ...] = (
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A box."},
        ],
        "images": ["a.png"],
        "tools": [],
    },
    {"prompt": [{"role": "user", "content": "What?"}], "completion": [{"role": "assistant", "content": "A box."}]},
    {"prompt": "What?", "completion": "A box.", "images": ["a.png"]},
    {"query": "<image>What?", "response": "A box.", "history": [["Hi", "Ho"]], "system": "", "images": [{"path": "a"}]},
    {"instruction": "Say", "input": "ho", "output": "Ho.", "history": [], "images": [{"bytes": None, "path": "a.png"}]},
    {"vit_num": 3, "token_num": 700, "image_flags": 1},
)
"""Of each format that the example does not have."""
_MIXTURES = {
    "meta.json": {"one": {"annotation": "a.jsonl", "root": ".", "repeat_time": 0.5, "max_dynamic_patch": 6}},
    "registry.json": {"one": {"annotation_path": "a.jsonl", "data_path": ""}},
    "dataset_info.json": {"one": {"file_name": "a.jsonl", "formatting": "sharegpt", "columns": {"images": "image"}}},
    "mix.yaml": {"datasets": [{"json_path": "a.jsonl", "sampling_strategy": "first:50%"}]},
}
_PLAN = plan_of("2+0r1,0", "0+2r0,2", packing=Packed(qv=9, qt=512, qv_min=8, qt_min=448))


class Specimens:
    """A job on a tiny model, its database, and one valid file of each kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, folder: Path) -> "Specimens":
        """Write the model, the data, the job and its database."""
        made = cls(folder)
        sys.path.insert(0, str(_EXAMPLE))
        importlib.import_module("generate").generate(folder / "example", _SAMPLES)
        variant_of(folder / "example", folder, _smaller)
        skeleton = build_skeleton(load_config(str(folder / MODEL)), torch.float32).model
        weights = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in skeleton.named_parameters()}
        save_file(weights, folder / MODEL / "model.safetensors")
        shutil.copy(_EXAMPLE / JOB, folder / JOB)
        (folder / PLAN).write_text(wire.encode(_PLAN))
        prepared = made.prepared
        work = prepared.workload
        profiled = ProfiledCosts(
            hardware=work.hardware, model=work.model, software=work.software, created=NOON, costs=COSTS
        )
        (folder / PROFILE).write_text(wire.encode(profiled))
        with open_store(f"sqlite:///{folder}/empty.db") as store, database(store.optuna_url):
            pass
        shutil.copy(folder / "empty.db", folder / "known.db")
        with open_store(f"sqlite:///{folder}/known.db") as store:
            _leave_results(store, prepared, folder / "spool")
            (folder / "bundle.jsonl").write_text("".join(store.export_studies([_studied(store, prepared)], "there")))
        return made

    @cached_property
    def job(self) -> Job:
        return load_job(self.folder / JOB)

    @cached_property
    def prepared(self) -> Prepared:
        return prepare(self.job, self.folder / "prepared")

    def of(self, kind: str) -> list[Files]:
        """Yield the specimens of a kind."""
        return list(getattr(self, f"_{kind}")())

    def _jobs(self) -> Iterator[Files]:
        yield {JOB: (self.folder / JOB).read_bytes()}
        yield {JOB: yaml.safe_dump(_full(self.job)).encode()}

    def _plans(self) -> Iterator[Files]:
        document = wire.to_document(_PLAN)
        yield {"plan.json": json.dumps({"plan": document, "epoch_seconds": 1.5}, indent=2).encode()}
        yield {"plan.yaml": yaml.safe_dump(document).encode()}

    def _lengths(self) -> Iterator[Files]:
        whole = json.dumps(_LENGTHS).encode()
        yield {"lengths.json": whole}
        yield {"lengths.jsonl": b"".join(json.dumps(each).encode() + b"\n" for each in _LENGTHS)}
        yield {"meta.json": b'{"one": {"token_lengths": "lengths.json"}}', "lengths.json": whole}

    def _annotations(self) -> Iterator[Files]:
        lines = (self.folder / DATA / "train.jsonl").read_bytes().splitlines(keepends=True)
        yield {"a.jsonl": b"".join(lines[:6])}
        yield {"a.json": json.dumps([json.loads(line) for line in lines[:6]], indent=1).encode()}
        yield from ({"a.jsonl": 2 * (json.dumps(record).encode() + b"\n")} for record in _RECORDS)
        yield from ({name: json.dumps(mixture).encode(), "a.jsonl": lines[0]} for name, mixture in _MIXTURES.items())

    def _results(self) -> Iterator[Files]:
        written = sorted(
            (self.folder / "spool").iterdir(), key=lambda path: path.stat().st_mtime_ns
        )  # names are random
        yield from ({path.name: path.read_bytes()} for path in written)

    def _bundles(self) -> Iterator[Files]:
        yield {"bundle.jsonl": (self.folder / "bundle.jsonl").read_bytes()}

    def _profiles(self) -> Iterator[Files]:
        yield {PROFILE: (self.folder / PROFILE).read_bytes()}

    def _models(self) -> Iterator[Files]:
        yield {path.name: path.read_bytes() for path in (self.folder / MODEL).iterdir()}

    def _progress(self) -> Iterator[Files]:
        steps = (Progress(step=step, of=9, loss=5.5 / step, seconds=0.25, samples=16) for step in range(1, 6))
        yield {"progress.jsonl": "".join(f"{wire.encode(step)}\n" for step in steps).encode()}


def _smaller(config: dict[str, Any]) -> None:
    config["vision_config"] |= {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}
    text = config["text_config"]
    text |= {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "layer_types": text["layer_types"][:2]}


def _full(job: Job) -> dict[str, Any]:
    """Return a job with every key."""
    document = job.model_dump(mode="json")
    document["model"] |= {"path": MODEL, "weights": "pretrained", "dtype": "float32"}
    source = {"path": f"{DATA}/train.jsonl", "images": DATA, "format": "internvl", "repeat": 1.5, "sampling": "75%"}
    document["data"] |= {
        "sources": [source | {"sampling": "first:75%"}],
        "oversize": "truncate",
        "max_tokens": 400,
        "workers": 1,
    }
    document["data"]["sources"][0]["names"] = None
    document["hardware"] = {"devices": 2, "memory_limit": "2GiB"}
    document["training"] |= {"output": "output", "checkpoint_every": 3}
    document["search"] |= {
        "device_hours": 0.5,
        "current_plan": PLAN,
        "queue": [PLAN],
        "objectives": ["time", "memory"],
        "sampler": "tpe",
    }
    document["search"]["space"] |= {
        "layouts": ["p2-d1-z0"],
        "packers": ["isf"],
        "qv": [9, 12],
        "qt": [512],
        "split": [2, 2],
        "recompute": [[1, 0], [0, 2]],
    }
    document["database"] = "sqlite:///store.db"
    return document


def _studied(store: Store, prepared: Prepared) -> str:
    """Store a finished study on the job, with a trial of every outcome, and a training."""
    study = store.create_study(store.add_workload(prepared.workload), {"trials": 5}, seed=7).id
    for qv, (name, outcome) in enumerate(OUTCOMES.items(), 1):
        store.finish_trial(result_of(store.start_trial(study, _plan(qv), name, {"qv": qv}).id, outcome))
    store.abandon_trial(store.start_trial(study, _plan(6), "sampled").id)
    concluded(store, best_of(study, plan=_plan(1), workload=prepared.workload))
    work = prepared.workload
    keys = (work.hardware.fingerprint, work.model.fingerprint, work.software)
    store.save_layer_profile(*keys, wire.encode(COSTS))
    launch = store.start_launch(_plan(1), work.fingerprint, 12.5).id
    store.finish_launch(
        LaunchResult(launch_id=launch, status="finished", steps=9, training_samples_per_second=9.5, finished=NOON)
    )
    store.add_window(slow_window(launch))
    return study


def _leave_results(store: Store, prepared: Prepared, folder: Path) -> None:
    """Leave results in the spool of trials, and of a training, that are open in the store."""
    study, spool = store.create_study(store.add_workload(prepared.workload), {}, seed=8).id, Spool(folder)
    for qv, outcome in enumerate(OUTCOMES.values(), 1):
        spool.put(result_of(store.start_trial(study, _plan(qv), "sampled").id, outcome))
    launch = store.start_launch(_plan(1), prepared.workload.fingerprint, 12.5).id
    spool.put(LaunchResult(launch_id=launch, status="failed", steps=4, training_samples_per_second=9.5, finished=NOON))
    spool.put(window_of(launch))


def _plan(qv: int) -> Plan:
    return replace(_PLAN, packing=Packed(qv=qv, qt=512, qv_min=qv, qt_min=448))
