"""DCP folders, written by several threads: now, or planned now and written later, from copies, without collectives."""

import copy
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hf_fsdp_tools.accelerator import SideStream, side_stream_for
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import storage_errors
from hf_fsdp_tools.saving.copies import THREADS, ToHost, host_copies


class ThreadedWriter(FileSystemWriter):
    """torch's writer; a rank writes as many files at a time as it has cores. torch's own threads lose their errors."""

    def __init__(self, path: str | PathLike[str], **options: Any) -> None:
        threads = max(1, min(THREADS, (os.cpu_count() or 1) // rank_on_node()[1]))
        # torch copies nothing ahead from an accelerator: a thread would use device 0 for it.
        super().__init__(path, thread_count=threads, per_thread_copy_ahead=0, **options)

    def _write_data(self, planner: SavePlanner, file_queue: Any) -> Future[list[WriteResult]]:
        one = copy.copy(self)
        one.thread_count = 1
        waiting = [file_queue.get() for _ in range(file_queue.qsize())]
        values = (planner.resolve_data(item) for _, _, items in waiting for item in items)
        side = side_stream_for(value for value in values if isinstance(value, torch.Tensor))
        on_host = planner if side is None else _OnHost(planner, side, self.thread_count)

        def write(file: Any) -> list[WriteResult]:
            files: Queue[Any] = Queue()
            files.put(file)
            found: list[WriteResult] = FileSystemWriter._write_data(one, on_host, files).value()
            return found

        with ThreadPoolExecutor(self.thread_count, thread_name_prefix="state") as pool:
            written = list(pool.map(write, waiting))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for results in written for result in results])
        return done


class _OnHost(DefaultSavePlanner):
    """What a planner gives to threads that write, copied to the host where it lies on a device."""

    def __init__(self, planner: SavePlanner, side: SideStream, threads: int) -> None:
        super().__init__()
        self._planner, self._side, self._to_host = planner, side, ToHost(side, threads=threads)

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        """The data of one item of the plan."""
        data: torch.Tensor | io.BytesIO = self._planner.resolve_data(write_item)
        if not isinstance(data, torch.Tensor) or not self._side.holds(data):
            return data
        copied = torch.empty(data.shape, dtype=data.dtype)
        for part in self._to_host.parts(data.detach(), copied) if data.numel() else ():
            self._to_host.copy(*part)
        return copied


class BufferedWriter(ThreadedWriter):
    """What `torch.distributed.checkpoint.save` takes as a writer, and what writes nothing until `write`.

    The plan of all ranks is made by `save` as always, which communicates. Then `copy_held` copies the values, and they
    may change.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path)
        self.data: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        """What this rank writes."""
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Keep what is to be written."""
        self._plan = plan
        self.data = {item.index: planner.resolve_data(item) for item in plan.items}
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the metadata, on the rank that coordinates."""
        self._metadata = metadata

    def write(self) -> int:
        """Write the folder; bytes of this rank. Every rank must call.

        Where each value lies in which file goes to rank 0 through files next to: of many ranks it is too much for a
        round of all ranks.
        """
        folder, (rank, num_ranks) = Path(self.path), rank_and_size()
        assert self._plan is not None, "write comes after save"
        files = [folder / f".written-by-{other}.incomplete" for other in range(num_ranks)]
        with agreed("writing a DCP folder", folder), storage_errors("save to", folder):
            with watched(folder):
                written = super().write_data(self._plan, _Held(self.data)).value()
                files[rank].write_text(json.dumps([asdict(result) for result in written]), "utf-8")
            all_ranks(None, "writing a DCP folder")
            if self._metadata is not None:
                with watched(folder):
                    super().finish(self._metadata, list(map(_read_results, files)))
                    for file in files:
                        file.unlink()
        self.data = {}
        return sum(result.size_in_bytes for result in written)


def copy_held(writer: BufferedWriter) -> int:
    """Copy what a writer is to write, which it writes from then on; the bytes of the copies. Every rank must call."""
    held = [(index, value) for index, value in writer.data.items() if isinstance(value, torch.Tensor)]
    copies = host_copies([(tensor, tensor.dtype) for _, tensor in held])
    writer.data |= zip([index for index, _ in held], copies, strict=True)
    return sum(copied.nbytes for copied in copies)


class _Held(DefaultSavePlanner):
    """A planner that gives what was copied."""

    def __init__(self, data: dict[MetadataIndex, torch.Tensor | io.BytesIO]) -> None:
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        """The data of one item of the plan."""
        return self._data[write_item.index]


def _read_results(file: Path) -> list[WriteResult]:
    return [
        WriteResult(
            index=MetadataIndex(**row["index"]),
            size_in_bytes=row["size_in_bytes"],
            storage_data=_StorageInfo(**row["storage_data"]),
        )
        for row in json.loads(file.read_text("utf-8"))
    ]
