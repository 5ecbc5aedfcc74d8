"""Steps on two nodes that average gradients after the last backward pass, and during it. Prints one JSON object.

    python -m benchmarks.cases.overlap [--rounds 6] [--mebibytes 1]

The nodes are this machine and a network namespace, joined by a virtual cable of 100 Mbit/s; each has one rank and a
core of its own. The model of examples/tiny-internvl trains in data parallelism with ZeRO 0 and 1, on packs of about 2
samples, 8 in a step. Both ways take turns on the same steps. It needs the right to make network namespaces, and `tc`.
"""

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autotune.workload import Prepared, prepare
from benchmarks.output.result import Check, at_least, finish, show
from benchmarks.prediction import example
from tests.machines.nodes import cable, two_nodes
from trials.launchers.node_ranks import NodeLauncher
from trials.plan import Layout, Packed, Plan, ZeroStage
from trials.run.pool import Answers, WarmPool
from trials.stage import Stage
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial

RATE = "100mbit"
ZEROS: tuple[ZeroStage, ...] = (0, 1)
STEPS = Trial(warmup_steps=(0, 1), timed_steps=(2, 3, 4, 5))
SAMPLES, BATCH, OF_PACK = 400, 8, 2
AMPLE_BYTES = 2 << 30


def main() -> None:
    arguments = _arguments()
    sizes = (0, arguments.mebibytes << 20)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepared = _prepared(folder)
        with (
            cable() as joined,
            two_nodes(joined) as nodes,
            WarmPool(NodeLauncher(nodes, folder / "ranks", 2, "cpu")) as pool,
        ):
            joined.limit(RATE)
            ways = [(zero, size) for zero in ZEROS for size in sizes]
            seconds: dict[tuple[ZeroStage, int], list[float]] = {way: [] for way in ways}
            for number in range(arguments.rounds):
                for way in random.Random(number).sample(ways, len(ways)):
                    seconds[way].append(_step_seconds(prepared, pool, *way))
                    show(f"round {number + 1}, ZeRO {way[0]}, buckets of {way[1]} bytes: {seconds[way][-1]:.2f} s")
    rows = [
        {
            "zero": zero,
            "bucket_bytes": size,
            "step_seconds": median(found),
            "least": min(found),
            "most": max(found),
            "after_over_this": median(after / this for after, this in zip(seconds[zero, 0], found, strict=True)),
        }
        for (zero, size), found in seconds.items()
    ]
    finish(rows, _checks(rows))


def _prepared(folder: Path) -> Prepared:
    job = example(folder, SAMPLES).job
    training = job.training.model_copy(update={"global_batch_samples": BATCH})
    prepared = prepare(job.model_copy(update={"training": training}), folder / "work")
    hardware = replace(prepared.workload.hardware, nodes=2)
    return replace(prepared, workload=replace(prepared.workload, hardware=hardware, memory_limit_bytes=AMPLE_BYTES))


def _step_seconds(prepared: Prepared, pool: WarmPool, zero: ZeroStage, bucket_bytes: int) -> float:
    model, index = prepared.workload.model, prepared.index
    qv, qt = (
        max(int(sizes.max()), round(OF_PACK * float(sizes.mean()))) for sizes in (index.vision_units, index.text_tokens)
    )
    plan = Plan(
        packing=Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt - 64, packer="best-fit"),
        layout=Layout(pipeline=1, data=2, zero=zero, bucket_bytes=bucket_bytes),
        stages=(Stage(vision=model.vision_layers, language=model.language_layers),),
    )
    answer = pool.ask(prepared.request(plan, STEPS), 200)
    assert isinstance(answer, Answers), answer
    report = answer.reports[0]
    assert isinstance(report, TrialReport)
    return fmean(report.step_seconds)


def _checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    return [
        at_least(f"ZeRO {zero}: step with averages after the pass, over that with averages during it", ratios, 1.1)
        for zero in ZEROS
        if (ratios := [row["after_over_this"] for row in rows if row["zero"] == zero and row["bucket_bytes"]])
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="runs of each way (%(default)s)")
    parser.add_argument("--mebibytes", type=int, default=1, help="least bytes of a bucket (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
