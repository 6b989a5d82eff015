"""Time a round of the ranks' agreement beside `all_gather_object`, and estimate a round of 1,000 ranks.

    python benchmarks/agreement.py                                              # 2, 4 and 8 ranks on this machine
    python benchmarks/agreement.py --ranks 2 4 8 16 --output benchmarks/results/agreement.md

Each rank is a process, and one more keeps the key-value store, as torchrun does. The ranks run the two ways in turn,
several times; the figure is the median of the times' means, with the lowest and the highest. Each rank gives a digest
of 64 bytes, equal on all of them. Every operation on the store is counted. What the store's one thread can answer is
measured by all ranks asking it at once.
"""

import argparse
import hashlib
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.current import rounds_of

ROUNDS = 200
"""Rounds of each turn."""

TURNS = 5
"""Turns of each way."""

ASKED = 2000
"""Operations of each rank that measure the store."""

ESTIMATED = (100, 1000)
"""Numbers of ranks to estimate."""

LOOKS = 12
"""Looks of one rank in half a second, each after twice the time."""

VALUE = hashlib.sha256().hexdigest()


class CountingStore:
    """A store that counts the operations of each kind."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.counts = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.counts[name] += 1
            return method(*args)

        return counted


def mean_ms(call: Callable[[], object]) -> float:
    """Mean time of one of many calls, after all ranks have begun."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        call()
    return 1e3 * (time.perf_counter() - begin) / ROUNDS


def gather() -> None:
    """The same by a collective of the process group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, VALUE)


def rank_main(rank: int, size: int, port: int, results: Any) -> None:
    """One rank; the first tells what it measured."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=300))
    dist.init_process_group("gloo", store=dist.PrefixStore(str(size), store), rank=rank, world_size=size)
    rounds = rounds_of()
    assert rounds is not None
    all_ranks(VALUE)
    gather()
    times: dict[str, list[float]] = {"round": [], "gather": []}
    for _ in range(TURNS):
        times["round"].append(mean_ms(lambda: all_ranks(VALUE)))
        times["gather"].append(mean_ms(gather))
    counting = CountingStore(rounds._store)
    rounds._store = counting
    mean_ms(lambda: all_ranks(VALUE))
    rounds._store = counting._store
    counts = sum(all_ranks(counting.counts), Counter[str]())
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(ASKED):
        store.check(["no such key"])
    dist.barrier()
    asked_us = 1e6 * (time.perf_counter() - begin) / (ASKED * size)
    if rank == 0:
        per_rank = {name: count / ROUNDS / size for name, count in counts.items()}
        results.put({"size": size, "times": times, "per_rank": per_rank, "asked_us": asked_us})
    dist.barrier()
    dist.destroy_process_group()


def store_main(port: Any) -> None:
    """The process that keeps the store."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)
    port.put(store.port)
    time.sleep(3600)


def measure(size: int) -> dict[str, Any]:
    """What the first of so many ranks measured."""
    context = multiprocessing.get_context("spawn")
    port, results = context.Queue(), context.Queue()
    keeper = context.Process(target=store_main, args=(port,), daemon=True)
    keeper.start()
    address = port.get()
    ranks = [context.Process(target=rank_main, args=(rank, size, address, results)) for rank in range(size)]
    for process in ranks:
        process.start()
    found: dict[str, Any] = results.get(timeout=600)
    for process in ranks:
        process.join()
    keeper.kill()
    return found


def shown(times: list[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


def report(measured: list[dict[str, Any]], command: str) -> str:
    """The result as Markdown."""
    last = measured[-1]
    per_rank = sum(count for kind, count in last["per_rank"].items() if kind != "check") + LOOKS
    kinds = sorted({name for one in measured for name in one["per_rank"]})
    lines = [
        "# What a round of the ranks' agreement takes",
        "",
        f"`{command}`, {date.today()}, torch {torch.__version__}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f} at the end. Times of one round in ms: the median of {TURNS} turns of {ROUNDS} "
        "rounds, the lowest and the highest.",
        "",
        "| ranks | round, ms | `all_gather_object` over gloo, ms | store: µs per operation, all ranks asking |",
        "|---|---|---|---|",
        *(
            f"| {one['size']} | {shown(one['times']['round'])} | {shown(one['times']['gather'])} | "
            f"{one['asked_us']:.0f} |"
            for one in measured
        ),
        "",
        "Operations on the store for one round and rank (`check` looks whether all have come):",
        "",
        f"| ranks | {' | '.join(kinds)} |",
        f"|---|{'---|' * len(kinds)}",
        *(
            f"| {one['size']} | {' | '.join(format(one['per_rank'].get(kind, 0), '.2f') for kind in kinds)} |"
            for one in measured
        ),
        "",
        "On paper: the store is one thread, which answers one operation in the time of the last column. A round of N "
        f"ranks that come together takes it N times the operations of one rank, {per_rank:.1f} with {LOOKS} looks, and "
        "what was joined is sent to each rank: 2 bytes per rank where values are equal, 0.1 kB per rank where they all "
        "differ.",
        "",
        "| ranks | operations | seconds | bytes sent, equal values | bytes sent, values that all differ |",
        "|---|---|---|---|---|",
    ]
    for size in ESTIMATED:
        operations = size * per_rank
        lines.append(
            f"| {size:,} | {operations:,.0f} | {operations * last['asked_us'] / 1e6:.2f} | {2e-6 * size**2:.1f} MB | "
            f"{1e-4 * size**2:.0f} MB |"
        )
    lines += [
        "",
        "A wait that lasts costs the store no more: 1,000 ranks that wait look at most 2,000 times a second together, "
        "and beat 500 times.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--output", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    text = report([measure(size) for size in args.ranks], " ".join(["python", *sys.argv]))
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
