"""What makes written files a checkpoint: an index of weights or the weights of an adapter; and the report of a save."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from hf_fsdp_tools.distributed.agreement import rank_and_size
from hf_fsdp_tools.errors import CheckpointError, storage_errors
from hf_fsdp_tools.loading.weight_files import CONFIG, WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.saving.layout import Layout
from hf_fsdp_tools.saving.target import Target
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hf_fsdp_tools.text import listed, show_bytes, table


def publish_weights(target: Target, layout: Layout) -> None:
    """Make complete weight files and all that lies next to them the checkpoint of a place. Every rank must call."""
    last = WEIGHTS_INDEX if WEIGHTS_INDEX in target.others else WEIGHTS
    if last == WEIGHTS_INDEX and rank_and_size()[0] == 0:
        sizes = {"total_parameters": layout.num_parameters, "total_size": layout.num_bytes}
        places = (*layout.places.items(), *layout.carried.items())
        content = {"metadata": sizes, "weight_map": {key: target.weights[str(place.file)] for key, place in places}}
        with storage_errors("write to", target.new):
            (target.new / last).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
    target.publish(last, {name: layout.sizes[file] for file, name in target.weights.items()}, ADAPTER_CONFIG)


def publish_adapter(target: Target) -> None:
    """Make the files next to the (absent) weights, among them a complete adapter, the adapter of a place.

    Full weights there stay, for they may be a base; unless they are this adapter's base, `config.json` next to them,
    for which they would be taken as its base, is a stranger. Every rank must call.
    """
    stranger = CONFIG
    if rank_and_size()[0] == 0:
        configs = sorted(target.new.rglob(ADAPTER_CONFIG), key=lambda path: len(path.parts))
        config = json.loads(configs[0].read_text("utf-8")) if configs else {}
        base = str(config.get("base_model_name_or_path") or "")
        stranger = "" if base and os.path.realpath(base) == os.path.realpath(target.where) else CONFIG
        if not target.shows_all_at_once and any(name.startswith("adapter_model.") for name in target.files()):
            _refuse_other_config(target, config)
    target.publish(ADAPTER_WEIGHTS, {}, stranger)


def _refuse_other_config(target: Target, config: Mapping[str, object]) -> None:
    """Refuse to replace an adapter by one of another configuration, of which a reader could get one file of each."""
    known, new = (
        {key: sorted(map(str, value)) if isinstance(value, list) else value for key, value in each.items()}
        for each in (
            json.loads(target.read(ADAPTER_CONFIG) or b"{}"),
            config,
        )  # sets as lists, in any order
    )
    if known and (other := [key for key in known | new if known.get(key) != new.get(key)]):
        raise CheckpointError(
            f"{target.where!r} holds an adapter of another configuration ({listed(other)}), and no store replaces two "
            "files at once. Save to another place, or remove that adapter first."
        )


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What one rank wrote, and the files of the checkpoint. `str()` gives a short table.

    Example:
        >>> report = save_pretrained(from_pretrained("checkpoint", load_kwargs={"progress": False}), "with-report")
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
    requantized: Mapping[str, float] = field(default_factory=dict)
    """What `keep_stored_format` changed by quantising weights again, by the name of the plain weight: its norm over
    that of the merged weight. Weights that the adapter left as they were are not in it."""

    def to_json(self) -> str:
        """All fields as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def error_of_quantizing(self) -> str:
        """The errors of `requantized` in one line: mean and worst."""
        worst = max(self.requantized, key=self.requantized.__getitem__)
        mean = sum(self.requantized.values()) / len(self.requantized)
        return (
            f"{len(self.requantized)} weights, relative error {mean:.2%} on average, {self.requantized[worst]:.2%} in "
            f"{worst}"
        )

    def __str__(self) -> str:
        rows = [
            ("saved to", self.folder),
            ("files", f"{len(self.files) or 'being written'}, {show_bytes(self.total_bytes)}"),
        ]
        if self.files:
            rows.append(("this rank", f"{show_bytes(self.bytes_written)} in {self.seconds:.2f} s"))
        if self.pause_seconds is not None:
            rows.append(("pause", f"{self.pause_seconds:.2f} s, for a copy of {show_bytes(self.copied_bytes)}"))
        if self.requantized:
            rows.append(("quantised again", self.error_of_quantizing()))
        if self.commit_url:
            rows.append(("uploaded", self.commit_url))
        return "\n".join(table(rows))
