"""Time a round of the ranks' agreement beside `all_gather_object`, and reckon rounds of 1,000 and 10,000 ranks.

    python benchmarks/agreement.py                                              # 2, 8, 64 and 256 ranks on this machine
    python benchmarks/agreement.py --ranks 2 4 8 --output FILE

Each rank is a process, and one more keeps the key-value store, as torchrun does. All ranks begin their first round at
once; then each is in a call for some seconds, so that it tells the others where it is; then rounds are timed, several
times. The figure is the median of the times' means, with the lowest and the highest. Each rank gives a digest of 64
bytes, equal on all of them. Every operation on the store is counted, and every connection to it. What the store's one
thread can answer is measured by all ranks asking it at once.
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

from hf_fsdp_tools.distributed.rounds import Rounds

TURNS = 5
"""Turns of each way."""

TIMED_ROUNDS = 1600
"""Rounds of all ranks together in a turn, at least 5 of each: so many ranks as 256 take longer for one."""

GATHERING = 8
"""Most ranks that also run `all_gather_object`, which needs a connection between each two ranks."""

RECKONED = (1000, 10_000)
"""Numbers of ranks to reckon with."""

LOOKS = 12
"""Looks of one rank in half a second, each after twice the time."""

HELD_S = 5.0
"""Seconds in a call: each rank tells twice where it is."""

VALUE = hashlib.sha256().hexdigest()


class CountingStore:
    """A store that counts the operations of each kind."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.counts = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def counted(*args: Any) -> Any:
            self.counts[name] += 1
            return getattr(self._store, name)(*args)

        return counted


def connections_of(process: int) -> int:
    """The sockets that a process has open."""
    files = Path(f"/proc/{process}/fd").iterdir()
    return sum(os.readlink(file).startswith("socket:") for file in files)


def rank_main(rank: int, size: int, port: int, keeper: int, results: Any) -> None:
    """One rank; the first tells what it measured."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=300))
    counting = CountingStore(store)
    rounds = Rounds(counting, rank, tuple(range(size)))
    number = max(5, TIMED_ROUNDS // size // 4)

    def meet(name: str) -> None:
        store.add(name, 1)
        while store.add(name, 0) < size:
            time.sleep(0.02)

    def mean_ms(name: str, call: Callable[[], object]) -> float:
        meet(name)
        begin = time.perf_counter()
        for _ in range(number):
            call()
        return 1e3 * (time.perf_counter() - begin) / number

    def exchange() -> list[Any]:
        return rounds.exchange(VALUE, "agreeing")

    def gather() -> None:
        dist.all_gather_object([None] * size, VALUE)

    meet("begun")
    begin = time.perf_counter()
    exchange()
    first_ms = max(rounds.exchange(1e3 * (time.perf_counter() - begin), "comparing times"))
    with rounds.scope("working"):
        time.sleep(HELD_S)
    told = store.check([f"{rounds._prefix}/beat/{other}" for other in range(size)])
    times: dict[str, list[float]] = {"round": [], "gather": []}
    if size <= GATHERING:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size)
    counting.counts.clear()
    for turn in range(TURNS):
        times["round"].append(mean_ms(f"rounds {turn}", exchange))
        if size <= GATHERING:
            times["gather"].append(mean_ms(f"gathers {turn}", gather))
    counts = sum(rounds.exchange(counting.counts, "adding up"), Counter[str]())
    asked = mean_ms("asked", lambda: [store.check(["no such key"]) for _ in range(20)])
    asked = statistics.mean(rounds.exchange(asked, "adding up"))
    if rank == 0:
        per_rank = {name: count / number / TURNS / size for name, count in counts.items()}
        results.put({
            "size": size, "first_ms": first_ms, "told": told, "times": times, "per_rank": per_rank,
            "asked_us": 1e3 * asked / 20 / size, "connections": connections_of(keeper),
        })  # fmt: skip
    meet("over")
    os._exit(0)


def store_main(port: Any) -> None:
    """The process that keeps the store."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)
    port.put(store.port)
    time.sleep(3600)


def measure(size: int) -> dict[str, Any]:
    """What the first of so many ranks measured."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    port, results = context.Queue(), context.Queue()
    keeper = context.Process(target=store_main, args=(port,), daemon=True)
    keeper.start()
    address = port.get()
    alone = connections_of(keeper.pid or 0)
    args = (size, address, keeper.pid, results)
    ranks = [context.Process(target=rank_main, args=(rank, *args), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    found: dict[str, Any] = results.get(timeout=600)
    for process in ranks:
        process.join()
    keeper.kill()
    return found | {"connections": (found["connections"] - alone) / size}


def shown(times: list[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})" if times else "not run"


def report(measured: list[dict[str, Any]], command: str) -> str:
    """The result as Markdown."""
    last = measured[-1]
    per_rank = sum(count for kind, count in last["per_rank"].items() if kind != "check") + LOOKS
    kinds = sorted({name for one in measured for name in one["per_rank"]})
    lines = [
        "# What a round of the ranks' agreement takes",
        "",
        f"`{command}`, {date.today()}, torch {torch.__version__}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f} at the end. Times of one round in ms: the median of {TURNS} turns, the lowest and "
        "the highest; of the first round, that of the slowest rank, all beginning at once.",
        "",
        "| ranks | first round, ms | round, ms | `all_gather_object` over gloo, ms | connections per rank | "
        "store: µs per operation, all ranks asking |",
        "|---|---|---|---|---|---|",
        *(
            f"| {one['size']} | {one['first_ms']:.0f} | {shown(one['times']['round'])} | "
            f"{shown(one['times']['gather'])} | {one['connections']:g} | {one['asked_us']:.0f} |"
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
        f"All ranks {'had' if all(one['told'] for one in measured) else 'had not'} told where they are before the "
        "connections were counted.",
        "",
        f"Reckoned: the store is one thread, which answers one operation in {last['asked_us']:.0f} µs here. A round of "
        f"N ranks that come together takes it N times the operations of one rank, {per_rank:.1f} with {LOOKS} looks. "
        "Where values are equal, as in most rounds, each rank reads 0.1 kB; where they all differ, 0.1 kB of each.",
        "",
        "| ranks | connections | operations | seconds | bytes sent, values equal | all different |",
        "|---|---|---|---|---|---|",
    ]
    for size in RECKONED:
        operations = size * per_rank
        lines.append(
            f"| {size:,} | {size * last['connections']:,.0f} | {operations:,.0f} | "
            f"{operations * last['asked_us'] / 1e6:.2f} | {1e-4 * size:.1f} MB | {1e-4 * size**2:,.0f} MB |"
        )
    lines += [
        "",
        "A wait that lasts costs the store no more: N ranks that wait look at most 2,000 times a second together, and "
        "tell where they are N / 2 times a second.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 256])
    parser.add_argument("--output", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    text = report([measure(size) for size in args.ranks], " ".join(["python", *sys.argv]))
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
