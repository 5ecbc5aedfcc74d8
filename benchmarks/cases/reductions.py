"""Averaging gradients over two nodes of several ranks: flat, and inside each node first. Prints one JSON object.

    python -m benchmarks.cases.reductions [--ranks 2] [--repeats 9]

The nodes are this machine and a network namespace, joined by a virtual cable; each has a core of its own. With each
link all ranks take turns at

- one all-reduce of all ranks, as DeepSpeed calls it;
- a reduce-scatter inside each node, an all-reduce of each share between the nodes, and a gather inside each node;
- the same with an all-to-all and a sum in place of the reduce-scatter;
- a reduce-scatter and a gather of all ranks, as ZeRO 3 calls them.

Counted are the seconds of the slowest rank, and the bytes that a node sends over the cable.
It needs the right to make network namespaces, and `tc`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import distributed

from benchmarks.output.result import Check, at_least, finish, show
from tests.machines.nodes import Cable, cable

LINKS: Mapping[str, str | None] = {"as it is": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
AT_ONCE, BY_NODES = "all-reduce", "by nodes, all-to-all and sum"
MEBIBYTES = (1, 8)
NODES = 2


def main() -> None:
    arguments = _arguments()
    if arguments.rank is not None:
        _serve(arguments)
        return
    rows: list[dict[str, Any]] = []
    with cable() as joined:
        for link, rate in LINKS.items():
            joined.limit(rate)
            rows += [{"link": link, **row} for row in _measured(joined, arguments)]
            for row in rows[-len(MEBIBYTES) * 5 :]:
                show(row)
    finish(rows, _checks(rows))


def _checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    def over(link: str, name: str) -> list[float]:
        found = {row["way"]: row[name] for row in rows if row["link"] == link and row["mebibytes"] == MEBIBYTES[-1]}
        return [found[AT_ONCE] / found[BY_NODES]]

    return [
        at_least("bytes between nodes, at once over on each node first", over("100 Mbit/s", "sent_over_size"), 1.4),
        at_least("100 Mbit/s: seconds at once over those on each node first", over("100 Mbit/s", "seconds"), 1.2),
    ]


def _measured(joined: Cable, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks of both nodes, and return what rank 0 has measured."""
    with socket.socket() as free:
        free.bind((joined.here, 0))
        rendezvous = f"tcp://{joined.here}:{free.getsockname()[1]}"
    cores = sorted(os.sched_getaffinity(0))
    started = []
    for rank in range(NODES * arguments.ranks):
        node = rank // arguments.ranks
        command = ["taskset", "--cpu-list", str(cores[node % len(cores)])]
        command += [sys.executable, "-m", "benchmarks.cases.reductions", f"--ranks={arguments.ranks}"]
        command += [f"--repeats={arguments.repeats}", f"--rank={rank}", f"--rendezvous={rendezvous}"]
        interface = f"{joined.namespace}-{'ab'[node]}"
        command.append(f"--interface={interface}")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        command = joined.on_other(command) if node else command
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    outputs = [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started)
    rows: list[dict[str, Any]] = json.loads(outputs[0])
    return rows


# --- in each rank ---


def _serve(arguments: argparse.Namespace) -> None:
    world = NODES * arguments.ranks
    distributed.init_process_group("gloo", init_method=arguments.rendezvous, rank=arguments.rank, world_size=world)
    rows = [row for size in MEBIBYTES for row in _rows(arguments, size << 20)]
    distributed.barrier()
    if arguments.rank == 0:
        json.dump(rows, sys.stdout)
    distributed.destroy_process_group()


def _rows(arguments: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    world, ranks = distributed.get_world_size(), arguments.ranks
    inside = [distributed.new_group(list(range(node * ranks, (node + 1) * ranks))) for node in range(NODES)]
    between = [distributed.new_group(list(range(place, world, ranks))) for place in range(ranks)]
    node, place = divmod(arguments.rank, ranks)
    gradients, share = torch.zeros(size // 4), torch.zeros(size // 4 // ranks)
    shares, least = torch.zeros(size // 4), torch.zeros(size // 4 // world)

    def by_nodes(scatter: Callable[[], None]) -> None:
        scatter()
        distributed.all_reduce(share, group=between[place])
        distributed.all_gather_into_tensor(gradients, share, group=inside[node])

    def reduce_scatter() -> None:
        distributed.reduce_scatter_tensor(share, gradients, group=inside[node])

    def exchange_and_sum() -> None:
        distributed.all_to_all_single(shares, gradients, group=inside[node])
        torch.sum(shares.view(ranks, -1), 0, out=share)

    ways: dict[str, Callable[[], object]] = {
        AT_ONCE: lambda: distributed.all_reduce(gradients),
        "by nodes, reduce-scatter": partial(by_nodes, reduce_scatter),
        BY_NODES: partial(by_nodes, exchange_and_sum),
        "reduce-scatter": lambda: distributed.reduce_scatter_tensor(least, gradients),
        "gather": lambda: distributed.all_gather_into_tensor(gradients, least),
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    sent: dict[str, int] = dict.fromkeys(ways, 0)
    for number in range(1 + arguments.repeats):
        for name, run in ways.items():
            found, of_cable = _timed(run, arguments.interface)
            if number:
                seconds[name].append(found)
                sent[name] += of_cable
    return [
        {
            "way": name,
            "mebibytes": size >> 20,
            "seconds": statistics.median(max(of_ranks) for of_ranks in seconds[name]),
            "seconds_of_ranks": [statistics.median(of_rank) for of_rank in zip(*seconds[name], strict=True)],
            "sent_over_size": sent[name] / arguments.repeats / size,
        }
        for name in ways
    ]


def _timed(run: Callable[[], object], interface: str) -> tuple[list[float], int]:
    """Return the seconds of all ranks, and the bytes that this node has sent over the cable meanwhile."""
    distributed.barrier()
    before, start = _sent_bytes(interface), perf_counter()
    run()
    seconds = perf_counter() - start
    distributed.barrier()
    sent = _sent_bytes(interface) - before
    of_ranks: list[float | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, seconds)
    return [each or 0.0 for each in of_ranks], sent


def _sent_bytes(interface: str) -> int:
    path = Path("/sys/class/net") / interface / "statistics" / "tx_bytes"
    return int(path.read_text()) if path.exists() else 0  # the other node has no view of its own of /sys


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of each node (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="of each exchange (%(default)s)")
    for name in ("--rank", "--rendezvous", "--interface"):
        parser.add_argument(name, type=int if name == "--rank" else str, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
