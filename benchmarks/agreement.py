"""Count the rounds of the ranks' agreement in a load and a save, and time a round.

    python benchmarks/agreement.py                                              # 2, 8 and 32 ranks on this machine
    python benchmarks/agreement.py --ranks 2 --output FILE

rounds    exchanges of values through the key-value store by rank 0, in one `from_pretrained` and one `save_pretrained`
          of a tiny Llama; and the seconds of both
round     milliseconds of one round in which all ranks give an equal digest of 64 bytes: median, lowest and highest of
          several turns. Beside it `all_gather_object` over gloo, which needs a connection between each two ranks
store     operations on the store for one round and rank
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from benchmarks.measuring.comparison import about, table_of
from hf_fsdp_tools import from_pretrained, save_pretrained
from hf_fsdp_tools.distributed.liveness import StoreClient
from hf_fsdp_tools.distributed.rounds import Rounds, rounds_of
from tests._checkpoints import make_checkpoint
from tests._dist import run_ranks

TURNS = 5
GATHERING = 8
"""Most ranks that also run `all_gather_object`."""


def counted(call: Callable[[], Any]) -> tuple[Any, int, float]:
    """The result of a call, its rounds, and its seconds."""
    rounds = 0

    def exchange(*args: Any, **options: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return usual(*args, **options)

    usual, begin = Rounds.exchange, time.perf_counter()
    with patch.object(Rounds, "exchange", exchange):
        result = call()
    return result, rounds, time.perf_counter() - begin


def times_ms(call: Callable[[], Any], number: int) -> list[float]:
    times = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(number):
            call()
        times.append(1e3 * (time.perf_counter() - begin) / number)
    return times


def measure(folder: str) -> dict[str, Any]:
    """Figures of one rank."""
    size, number = dist.get_world_size(), max(5, 400 // dist.get_world_size())
    from_pretrained(folder)  # imports the rest
    model, loads, load_s = counted(lambda: from_pretrained(folder))
    _, saves, save_s = counted(lambda: save_pretrained(model, f"{folder}-saved"))
    rounds, operations = rounds_of(), Counter[str]()
    assert rounds is not None
    asked = StoreClient._ask

    def ask(client: StoreClient, operation: str, *args: Any) -> Any:
        operations[operation] += 1
        return asked(client, operation, *args)

    with patch.object(StoreClient, "_ask", ask):
        took = times_ms(lambda: rounds.exchange("0" * 64, "agreeing"), number)
    gathers = times_ms(lambda: dist.all_gather_object([None] * size, "0" * 64), number) if size <= GATHERING else []
    figures = {"loads": loads, "load_s": load_s, "saves": saves, "save_s": save_s, "round": took, "gather": gathers}
    return figures | {"operations": {name: count / number / TURNS for name, count in operations.items()}}


def show(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})" if times else "not run"


def report(measured: dict[int, dict[str, Any]]) -> str:
    """The result as Markdown."""
    made = about("benchmarks/agreement.py", "cpu")
    lines = ["# Rounds of the ranks' agreement", "", f"`{made['command']}`, {made['where']}", ""]
    columns = ["ranks", "load: rounds", "s", "save: rounds", "s", "round, ms", "`all_gather_object`, ms", "store"]
    rows = []
    for size, one in measured.items():
        operations = ", ".join(f"{name} {count:.1f}" for name, count in sorted(one["operations"].items()))
        load, save = ([f"{one[f'{call}s']}", f"{one[f'{call}_s']:.2f}"] for call in ("load", "save"))
        rows.append([f"{size}", *load, *save, show(one["round"]), show(one["gather"]), operations])
    return "\n".join([*lines, *table_of(columns, rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--output", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint("llama", Path(folder, "llama"))
        text = report({size: run_ranks(measure, size, str(checkpoint))[0] for size in args.ranks})
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
