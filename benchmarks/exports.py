"""Packs that other trainers rebuild from exported data, by their own functions. Prints one JSON object.

    python -m benchmarks.exports [--lengths FOLDER] [--samples 5000] [--ms-swift PYTHON [--train]]
                                 [--llama-factory PYTHON] [--prices]

For generated lengths, and those of each cache of the folder in OmniBal's form, packs of several lengths are put in the
order of an export. Where ms-swift is installed, its own `PackingDataset` packs the file and its own `BatchSamplerShard`
deals the packs to ranks; else `installed` is false and nothing is compared with it. Install it in an environment of its
own, together with this package.

The packages in the environments of `--ms-swift` and `--llama-factory` count the tokens of samples with pictures, and
their own parsers read the exported configurations. With `--train` ms-swift also trains an exported plan on CPU ranks.
With `--prices` plans of large models are solved within the limits of each trainer, on devices of data sheets.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from autotune.exporting.trainers import ms_swift
from autotune.job_file import JobFile
from autotune.packing.material import PackOptions, paper_weights, read_material
from autotune.search.space.sequential import PackOrder, order_of
from benchmarks.cases.lengths import CAPACITIES, generated
from benchmarks.exported.prices import price_checks, price_rows
from benchmarks.exported.tokens import token_checks, token_rows
from benchmarks.exported.training import training_checks, training_row
from benchmarks.output.result import at_least, at_most, finish, show
from trials.data.epoch import Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.plan import MOST_UNITS, Packed

_RANKS, _LENGTHS, _BATCH, _TRIED = (2, 4, 8), (8192, 16384), 128, 40
_DECIDED = ("packing_length", "packing_strategy", "packing_num_proc", "dataset_shuffle", "train_dataloader_shuffle")


def main() -> None:
    parser = argparse.ArgumentParser()
    folder = os.environ.get("AUTOTUNE_TEST_LENGTHS")
    parser.add_argument("--lengths", type=Path, default=folder and Path(folder), help="folder of length caches")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--ms-swift", type=Path, help="Python of an environment with ms-swift")
    parser.add_argument("--llama-factory", type=Path, help="Python of an environment with LLaMA-Factory")
    parser.add_argument("--train", action="store_true", help="train an exported plan with ms-swift, too")
    parser.add_argument("--prices", action="store_true", help="predict what each trainer costs, too")
    arguments = parser.parse_args()
    if arguments.train and arguments.ms_swift is None:
        parser.error("--train needs --ms-swift")
    swift = _swift()
    rows = [
        _row(name, index, qt, ranks, swift)
        for name, index in _indexes(arguments.lengths, arguments.samples)
        for qt in _LENGTHS
        for ranks in _RANKS
    ]
    pythons = {"ms-swift": arguments.ms_swift, "llama-factory": arguments.llama_factory}
    tokens = [*token_rows({trainer: python for trainer, python in pythons.items() if python})]
    held = [row for row in rows if row["packs"]]
    checks = [at_least("share of cases with an order", [len(held) / len(rows)], 0.9)]
    if swift is not None:
        checks.append(at_most("cases with other packs, rows or samples in ms-swift", [sum(map(_differs, held))], 0))
        checks.append(at_most("arguments that ms-swift does not have", [len(swift.unknown)], 0))
    checks += token_checks(tokens) if tokens else []
    trained = [training_row(arguments.ms_swift)] if arguments.train else []
    checks += [check for row in trained for check in training_checks(row)]
    prices = [*price_rows()] if arguments.prices else []
    checks += price_checks(prices) if prices else []
    installed = {"installed": swift and swift.version, "unknown": swift and swift.unknown}
    finish([installed, *rows, *tokens, *trained, *prices], checks)


def _indexes(folder: Path | None, samples: int) -> Iterator[tuple[str, DatasetIndex]]:
    for kind in CAPACITIES:
        yield kind, generated(kind, samples)
    for path in sorted(folder.glob("*.json")) if folder else ():
        index = read_material(JobFile(path=path), PackOptions()).index
        yield path.stem, index.keep(np.arange(min(samples, len(index))))


def _row(name: str, index: DatasetIndex, qt: int, ranks: int, swift: SimpleNamespace | None) -> dict[str, Any]:
    show(f"{name}, {qt} tokens, {ranks} ranks")
    settings = EpochSettings(global_batch_samples=_BATCH, weights=paper_weights())
    usual = Packed(qv=MOST_UNITS, qt=qt, qv_min=MOST_UNITS, qt_min=qt, packer="best-fit")
    row = {"data": name, "qt": qt, "ranks": ranks, "samples": len(index), "packs": 0}
    first = build_epoch(index, usual, settings, data_parallel=ranks)
    for tried in range(_TRIED):
        length = qt - tried * qt // 512
        epoch = build_epoch(index, replace(usual, qt=length, qt_min=length), settings, data_parallel=ranks)
        if (order := order_of(epoch)) is not None:
            found: dict[str, Any] = {"packs": len(order.packs), "usual_packs": len(first.packs), "shorter": tried / 512}
            found |= {"moved": order.moved, "spare": list(order.spare)}
            return row | found | ({} if swift is None else _compared(epoch, order, swift))
    return row


def _differs(row: dict[str, Any]) -> bool:
    return not (row["same_packs"] and row["same_rows"] and row["each_once"])


def _compared(epoch: Epoch, order: PackOrder, swift: SimpleNamespace) -> dict[str, Any]:
    """Compare what ms-swift makes of the file with the epoch: packs, those of each rank in turns, and samples."""
    rows = np.concatenate(order.packs)
    packs = [rows[pack].tolist() for pack in swift.packed(epoch.index.text_tokens[rows].tolist(), order.length)]
    ranks = epoch.data_parallel
    dealt = [[packs[item] for item in swift.dealt(len(packs), ranks, rank)] for rank in range(ranks)]
    planned = [[order.packs[place].tolist() for place in range(rank, len(order.packs), ranks)] for rank in range(ranks)]
    shown = sorted(sample for of_rank in dealt for pack in of_rank for sample in pack)
    return {
        "same_packs": packs == [pack.tolist() for pack in order.packs],
        "same_rows": dealt == planned,
        "each_once": shown == sorted(epoch.packs.samples.tolist()),
    }


def _swift() -> SimpleNamespace | None:
    """Return ms-swift's own functions; None where it is not installed."""
    try:
        packing, shard = import_module("swift.dataset.packing"), import_module("swift.dataloader.shard")
    except ImportError:
        return None

    def packed(lengths: list[int], length: int) -> list[list[int]]:
        template = SimpleNamespace(max_length=length)
        dataset = _Lengths({"lengths": lengths})
        made = packing.PackingDataset(template, dataset, packing_length=length, packing_strategy="sequential")
        found: list[list[int]] = made.packed_idx
        return found

    def dealt(count: int, ranks: int, rank: int) -> list[int]:
        class OfRank(shard.BatchSamplerShard):  # type: ignore[misc, name-defined]  # the class is not known here
            world_size, rank = ranks, 0

        OfRank.rank = rank
        sampler = OfRank(count, batch_size=1, shuffle=False, drop_last=False, data_seed=0)
        return [item for batch in sampler for item in batch]

    return SimpleNamespace(
        packed=packed, dealt=dealt, version=import_module("swift.version").__version__, unknown=_unknown_arguments()
    )


def _unknown_arguments() -> list[str] | None:
    """Return the arguments of an export that ms-swift does not have; None where its arguments cannot be imported."""
    known = {field.name for field in fields(import_module("swift.arguments.sft_args").SftArguments)}
    return sorted({*ms_swift.ARGUMENTS, *_DECIDED} - known)


class _Lengths(dict[str, Any]):
    """The part of a data set that is packed."""

    def __len__(self) -> int:
        return len(self["lengths"])


if __name__ == "__main__":
    main()
