"""Tokens that trainers count for generated samples, and their own parsers on the configuration, by the real packages.

Models are tiny and have no weights; templates, processors, pictures and texts are real.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.errors import ExportError
from autotune.exporting.closest import HeldPlan
from autotune.exporting.counting.counted import Counted
from autotune.exporting.same_tokens import compare_tokens
from autotune.exporting.trainers import EXPORTS, Export, Exporter
from autotune.job_file import job_of_values
from autotune.model_shape import model_shape
from autotune.search.space.sequential import order_of
from benchmarks.devices.models import rewrite
from benchmarks.exported.published import number_as_published, write_conversations
from benchmarks.output.result import Check, at_most, show
from benchmarks.packing import WEIGHTS
from tests.tiny_models import qwen2_5_vl, qwen2_vl, qwen3_vl
from trials import plugins
from trials.data.epoch import EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.data.indexing import build_index
from trials.model.inputs.encoders import load_measurer
from trials.plan import MOST_UNITS, Layout, Packed, Padded, Plan
from trials.stage import Stage
from trials.workload import ModelShape

_MODELS = {
    "qwen2_vl": (qwen2_vl.make, "Qwen2VLForConditionalGeneration", "Qwen2-VL-2B-Instruct"),
    "qwen2_5_vl": (qwen2_5_vl.make, "Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL-3B-Instruct"),
    "qwen3_vl": (qwen3_vl.make, "Qwen3VLForConditionalGeneration", "Qwen3-VL-2B-Instruct"),
}
"""What makes a tiny model, its class in published configurations, and a published name, by which ms-swift goes."""
_PATCHES, _MERGED, _LEAST = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}, 2, 4
"""Pixels in a row of a patch as published, as trainers build on them; patches merged in a row; tokens of an image."""
_PROMPT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
"""What the published templates of Qwen2-VL and Qwen2.5-VL write where a conversation has no system prompt."""
_NO_PROMPT: dict[str, dict[str, Any]] = {"ms-swift": {"system": ""}, "llama-factory": {"default_system": ""}}
_SAMPLES, _BATCH, _SECONDS = 64, 8, 300
_PARSING = Path(__file__).with_name("parsing.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model whose template writes a system prompt of its own or not, and what is given to a trainer."""

    family: str
    writes_prompt: bool = False
    without_prompt: bool = False
    """Whether the trainer's configuration says that there is none."""
    image_tokens: int = 400
    """Most tokens of an image, above which it is made smaller; pictures have up to 300."""
    refused: tuple[str, ...] = ()
    """Trainers that count too many other tokens."""


CASES = (
    Case(family="qwen2_vl", writes_prompt=True),
    Case(family="qwen2_5_vl", writes_prompt=True),
    Case(family="qwen2_5_vl", refused=("ms-swift", "llama-factory")),
    Case(family="qwen2_5_vl", without_prompt=True),
    # LLaMA-Factory makes pictures smaller before the processor does, and rounds their sides otherwise.
    Case(family="qwen2_5_vl", writes_prompt=True, image_tokens=80, refused=("llama-factory",)),
    Case(family="qwen3_vl"),
)


class _Once:
    """A trainer whose counts are kept."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self.rows: Sequence[int] = ()
        self.counted: Counted | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exporter, name)

    def count(self, export: Export, rows: Sequence[int], folder: Path) -> Counted:
        self.rows, self.counted = rows, self._exporter.count(export, rows, folder)
        return self.counted


def token_rows(pythons: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield what each trainer counts for each model, in the environments of `pythons` by trainer."""
    for case in CASES:
        with TemporaryDirectory() as name:
            folder = Path(name)
            model = _model(folder, case)
            data = write_conversations(folder, _SAMPLES)
            for trainer, python in pythons.items():
                show(f"tokens: {trainer}, {case}")
                present = _NO_PROMPT[trainer] if case.without_prompt else {}
                export = _export(trainer, python, model, data, folder=folder / trainer, present=present)
                row = {**asdict(case), "present": present, "refused": trainer in case.refused}
                yield {**row, "trainer": trainer, **_compared(trainer, export), **_parsed(trainer, export)}


def token_checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    wrong = [row for row in rows if (row["refusal"] is not None) != row["refused"] or row["why_not"]]
    unread = [row for row in rows if row["otherwise"] or row["ignored"] or row["failed"]]
    return [
        at_most("cases whose tokens are judged wrong", [len(wrong)], 0),
        at_most("configurations that a trainer's own parser does not read as they are", [len(unread)], 0),
    ]


def _model(folder: Path, case: Case) -> Path:
    make, architecture, name = _MODELS[case.family]
    model = folder / name
    make(model)
    rewrite(model / "config.json", lambda config: config.update(architectures=[architecture]))
    if (patch := _PATCHES.get(case.family)) is not None:
        least, most = ((_MERGED * patch) ** 2 * count for count in (_LEAST, case.image_tokens))
        sizes = {"patch_size": patch, "size": {"shortest_edge": least, "longest_edge": most}}
        rewrite(model / "config.json", lambda config: config["vision_config"].update(patch_size=patch))
        rewrite(model / "preprocessor_config.json", lambda settings: settings.update(sizes))
        number_as_published(model)
    if case.writes_prompt:
        template = model / "chat_template.jinja"
        template.write_text(_PROMPT + template.read_text())
    return model


def _export(trainer: str, python: Path, model: Path, data: Path, *, folder: Path, present: Mapping[str, Any]) -> Export:
    job = job_of_values(
        {
            "model": {"path": str(model), "weights": "random", "dtype": "float32"},
            "data": {"sources": [{"path": str(data)}]},
            "training": {"global_batch_samples": _BATCH, "output": str(folder / "output")},
        }
    )
    index, _ = build_index(job.data, load_measurer(job.model, job.data), Path())
    shape = model_shape(job.model, job.training)
    held = _packed(index, shape) if trainer == "ms-swift" else _padded(shape)
    settings = EpochSettings(global_batch_samples=_BATCH, weights=WEIGHTS)
    return Export(
        job=job,
        epoch=build_epoch(index, held.plan.packing, settings, data_parallel=1),
        held=held,
        nodes=1,
        family=shape.family,
        folder=folder,
        cuts_at=None,
        held_out=None,
        present=present,
        left_variables=(),
        videos=None,
        python=python,
    )


def _plan(shape: ModelShape, packing: Packed | Padded) -> Plan:
    stage = Stage(vision=shape.vision_layers, language=shape.language_layers)
    return Plan(packing=packing, layout=Layout(pipeline=1, data=1, zero=0), stages=(stage,))


def _padded(shape: ModelShape) -> HeldPlan:
    return HeldPlan(plan=_plan(shape, Padded(samples=2)), seconds=0.0)


def _packed(index: DatasetIndex, shape: ModelShape) -> HeldPlan:
    """Return packs that their order tells, with some room for other tokens."""
    settings = EpochSettings(global_batch_samples=_BATCH, weights=WEIGHTS)
    longest = int(index.text_tokens.max())
    usual = Packed(qv=MOST_UNITS, qt=longest, qv_min=MOST_UNITS, qt_min=longest, packer="best-fit")
    for qt in range(longest, 3 * longest):
        packing = replace(usual, qt=qt, qt_min=qt)
        order = order_of(build_epoch(index, packing, settings, data_parallel=1))
        if order is not None and min(-order.spare[0], order.spare[1]) >= 1:
            return HeldPlan(plan=_plan(shape, packing), seconds=0.0, order=order)
    raise ValueError("no length has packs that their order tells")


def _compared(trainer: str, export: Export) -> dict[str, Any]:
    once = _Once(plugins.load(EXPORTS, trainer))
    notes, refusal = [], None
    try:
        notes = list(compare_tokens(once, export))
    except ExportError as error:
        if once.counted is None:
            raise
        refusal = str(error).partition(": ")[2]
    assert once.counted is not None
    here = export.epoch.index.text_tokens[once.rows].tolist()
    tokens = once.counted.tokens
    more = [there - ours for there, ours in zip(tokens, here, strict=True) if isinstance(there, int)]
    found = {"by": once.counted.by, "why_not": once.counted.why_not, "samples": len(more), "notes": notes}
    return {**found, "refusal": refusal, "fewest_more": min(more, default=None), "most_more": max(more, default=None)}


def _parsed(trainer: str, export: Export) -> dict[str, Any]:
    """Return what the trainer's own parser reads otherwise than it was written, and what it ignores."""
    export.folder.mkdir()
    plugins.load(EXPORTS, trainer).write(export, export.folder)
    command = (export.python or sys.executable, _PARSING, trainer, "sft.yaml")
    done = subprocess.run(command, cwd=export.folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1], "ignored": [], "otherwise": {}}
    return {"failed": None, **json.loads(done.stdout.strip().splitlines()[-1])}
