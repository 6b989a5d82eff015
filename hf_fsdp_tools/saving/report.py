"""The report of a save, as a value that can be printed and stored."""

import json
from dataclasses import asdict, dataclass

from hf_fsdp_tools.text import show_bytes, table


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What one rank wrote, and the files of the checkpoint. `str()` gives a short table.

    Example:
        >>> report = save_pretrained(from_pretrained("checkpoint", load_kwargs={"progress": False}), "saved-and-told")
        >>> isinstance(report, SaveReport), report.files
        (True, ('model.safetensors',))
    """

    folder: str
    """The folder of the checkpoint."""

    files: tuple[str, ...] = ()
    """Names of the weight files, in order; of a training state, of all files. Empty until a save in the background is
    done."""

    total_bytes: int = 0
    """Bytes of tensor data in all files; of a training state, of the files as they are."""

    bytes_written: int = 0
    """Bytes of tensor data that this rank wrote."""

    gathered_bytes: int = 0
    """The part of `total_bytes` that rank 0 gathered before writing, because it cannot be written shard by shard."""

    write_calls: int = 0
    """System calls of this rank that wrote data."""

    seconds: float = 0.0
    """Seconds from the call until the checkpoint was there for everyone, on this rank."""

    copied_bytes: int = 0
    """Bytes of host memory that the copy took from which this rank wrote in the background; 0 for a blocking save."""

    pause_seconds: float | None = None
    """Seconds from call to return of a save in the background; None for a blocking one, which returns at its end."""

    others: tuple[str, ...] = ()
    """Names of the other files of the checkpoint: config, index, tokenizer, model code."""

    commit_url: str = ""
    """Page of the commit on the hub; empty where nothing was uploaded."""

    def to_json(self) -> str:
        """All fields as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        rows = [
            ("saved to", self.folder),
            ("files", f"{len(self.files) or 'being written'}, {show_bytes(self.total_bytes)}"),
        ]
        if self.files:
            rows.append(("this rank", f"{show_bytes(self.bytes_written)} in {self.seconds:.2f} s"))
        if self.pause_seconds is not None:
            rows.append(("pause", f"{self.pause_seconds:.2f} s, for a copy of {show_bytes(self.copied_bytes)}"))
        if self.commit_url:
            rows.append(("uploaded", self.commit_url))
        return "\n".join(table(rows))
