"""Rows of the training census: each type in processes of its own, with a time limit."""

import gc
import importlib
import json
import multiprocessing
import os
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.architectures.agree import PRECISIONS, Case, Figures, examine_sharded, plain_figures, repeated_alone
from benchmarks.architectures.cases import NotBuiltError, make_case
from benchmarks.architectures.defaults import CONFIG_MAPPING, build_config, classes_of
from benchmarks.architectures.tables import render

__all__ = ["judged", "write_census"]

WORLD = 2
TIMEOUT_S = 180.0  # of the harness: a type that takes longer is ended and named
GRACE_S = 5.0  # for the other rank to say its own error
CHECKS = ("load", "outputs", "loss", "gradients", "step", "resharded", "save")
Row = dict[str, Any]
_context = multiprocessing.get_context("fork")


def write_census(output: Path, only: list[str], jobs: int, *, only_failed: bool) -> int:
    """Write a row of each type to a file of JSON lines as it comes, and the summary beside it; return the exit status.

    Args:
        output: continued where it exists: what has a row is not run again.
        only: these types, also where they have a row; all of them where the list is empty.
        jobs: how many types are examined at a time.
        only_failed: run again what has a row and does not agree.
    """
    written = written_rows(output)
    if only or only_failed:
        types = only or [name for name, row in written.items() if row["verdict"] != "agrees"]
    else:
        types = [name for name in sorted(CONFIG_MAPPING.keys()) if name not in written and has_class(name)]
    prepare()
    with output.open("a") as file:
        for count, row in enumerate(rows_of(types, jobs), 1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{count} of {len(types)}: {row['type']} {row['verdict']} {row['why']}", file=sys.stderr)
    rows = written_rows(output)
    output.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))  # the last row of each type
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    output.with_suffix(".md").write_text(render(rows.values(), versions, output.name))
    return int(any(rows[name]["verdict"] == "failed" for name in types))


def has_class(model_type: str) -> bool:
    """Whether transformers registers a model class for a type of configuration."""
    try:
        config = build_config(model_type)
    except Exception:
        config = None
    return bool(classes_of(model_type, config))


def prepare() -> None:
    """Import once what every type needs; processes are forked from this one."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    torch.set_num_threads(1)
    for name in (
        "transformers.models.llama.modeling_llama",
        "hf_fsdp_tools.pretrained",
        "hf_fsdp_tools.saving.save",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def rows_of(types: list[str], jobs: int) -> Iterator[Row]:
    """One row of each type, as they come.

    Args:
        types: model types of transformers.
        jobs: how many are examined at a time; each takes two processes.
    """
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(row_of, name) for name in types]):
            yield future.result()


def written_rows(path: Path) -> dict[str, Row]:
    """The rows of a file by type, the last of each; none where there is no file yet."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def row_of(model_type: str) -> Row:
    """The row of a type; a crash or a hang of its processes is said in it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="census-", ignore_cleanup_errors=True) as folder:
        receiver, sender = _context.Pipe(duplex=False)
        leader = _context.Process(target=_lead, args=(sender, model_type, folder))
        leader.start()
        sender.close()
        row: Row = {"type": model_type, "verdict": "failed", "why": "crashed before it said anything"}
        try:
            while receiver.poll(max(TIMEOUT_S - (time.monotonic() - start), 0)):
                row |= receiver.recv()
            row["why"] = f"still running after {TIMEOUT_S:.0f} s: {row['why']}"
        except EOFError:
            pass
        if leader.is_alive():
            _end_group(leader)
        leader.join()
    cleaned = {key: without_paths(value, folder) for key, value in row.items()}
    return cleaned | {"seconds": round(time.monotonic() - start, 1)}


def without_paths(value: Any, folder: str) -> Any:
    """A text without the names of this machine's folders."""
    if not isinstance(value, str):
        return value
    return value.replace(f"{folder}/", "").replace(f"{sysconfig.get_path('purelib')}/", "")


def _end_group(leader: Any) -> None:
    """End the leader and its ranks, which are in one group of processes."""
    leader.join(0.5)
    try:
        os.killpg(leader.pid, 9)
    except ProcessLookupError:
        leader.kill()


def _lead(sender: Connection, model_type: str, folder: str) -> None:
    """Make the case, ask the plain model, then the ranks; say what is known as it becomes known."""
    os.setpgrp()
    _silence()
    torch.set_num_threads(1)
    try:
        sender.send({"verdict": "not built", "why": "making the checkpoint"})
        case, facts = make_case(model_type, Path(folder, "checkpoint"))
        sender.send({**facts, "verdict": "plain", "why": "the plain model"})
        plain = {}
        for precision in PRECISIONS:
            try:
                plain[precision] = plain_figures(case, precision, WORLD)
            except Exception as error:
                sender.send(
                    {f"{precision}_plain": f"fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
                )
                continue
            sender.send(
                {f"{precision}_plain": plain[precision].how, f"{precision}_plain_fails": plain[precision].fails}
            )
        if "fp32" not in plain:
            sender.send({"verdict": "plain", "why": "the plain model, reopened, fails"})
            return
        sender.send({"verdict": "failed", "why": "the ranks"})
        row = judged(_ask_ranks(case, plain, folder))
        sender.send(row)
        if row["why"] and (found := repeated_alone(case, plain["fp32"], WORLD)):
            sender.send({"alone": "; ".join(filter(None, (facts["alone"], found)))})
    except NotBuiltError as error:
        sender.send({"verdict": "not built", "why": str(error)[:1500]})
    except BaseException as error:
        sender.send({"why": f"{type(error).__name__}: {error}"[:500], **_trace()})
    finally:
        sender.close()
        os._exit(0)


def _ask_ranks(case: Case, plain: dict[str, Figures], folder: str) -> list[Row]:
    pipes, ranks = [], []
    for rank in range(WORLD):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank, args=(sender, rank, folder, case, plain))
        process.start()
        sender.close()
        pipes.append(receiver)
        ranks.append(process)
    said: list[Row] = [{} for _ in ranks]
    open_pipes = list(range(WORLD))
    deadline = float("inf")
    while open_pipes and time.monotonic() < deadline:
        for rank in list(open_pipes):
            try:
                while pipes[rank].poll(0.02):
                    said[rank] |= pipes[rank].recv()
                    if "error" in said[rank]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            except EOFError:
                open_pipes.remove(rank)
                ranks[rank].join()
                if ranks[rank].exitcode:
                    said[rank].setdefault("error", f"rank {rank} died with exit code {ranks[rank].exitcode}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    for process in ranks:
        process.kill()
        process.join()
    return said


def _rank(sender: Connection, rank: int, folder: str, case: Case, plain: dict[str, Figures]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    precision = ""
    try:
        store = dist.FileStore(str(Path(folder, "store")), WORLD)
        patience = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=patience)
        for precision in plain:
            row = examine_sharded(case, precision, plain[precision], plain["fp32"])
            sender.send({f"{precision}_{key}": value for key, value in row.items()})
        dist.barrier()
    except BaseException as error:
        text = f"{precision}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
        sender.send({"error": text, **_trace()})
    finally:
        sender.close()
        os._exit(0)


def judged(said: list[Row]) -> Row:
    """One row of what all ranks said: the worst of each check, a verdict, and why.

    Args:
        said: by rank, the results of `examine_sharded`, each key after its precision and `_`; or what the rank raised,
            as "error".
    """
    row: Row = {}
    faults: list[str] = []
    for precision in PRECISIONS:
        for check in (*CHECKS, "units", "gathered", "allowed"):
            values = [rank[f"{precision}_{check}"] for rank in said if f"{precision}_{check}" in rank]
            if not values:
                continue
            if isinstance(values[0], tuple):
                row[f"{precision}_{check}"] = max(value for value, _ in values)
                faults += [f"{precision} {check}: {what}" for _, what in values if what][:1]
            elif isinstance(values[0], str):
                row[f"{precision}_{check}"] = "differs" if any(values) else "ok"
                faults += [f"{precision} {check}: {what}" for what in values if what][:1]
            else:
                row[f"{precision}_{check}"] = max(values)
        if row.get(f"{precision}_gathered", 0) > row.get(f"{precision}_allowed", 0):
            faults.append(f"{precision}: {row[f'{precision}_gathered']} units gathered at a time")
    errors = [rank["error"] for rank in said if "error" in rank]
    traces = [rank["trace"] for rank in said if "trace" in rank][:1]
    why = "; ".join(dict.fromkeys([*errors, *faults]))
    row |= {"verdict": "failed" if why else "agrees", "why": why}
    return row | ({"trace": traces[0]} if traces else {})


def _trace() -> Row:
    """Where an exception was raised, for a developer who asks for it."""
    return {"trace": traceback.format_exc()[-1800:]} if os.environ.get("CENSUS_TRACE") else {}


def _silence() -> None:
    """What models say while they run is not the table."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
