"""The commands `hf-fsdp export` and `hf-fsdp merge`: a training state, or an adapter, as a Hugging Face checkpoint."""

import argparse
import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.common import add_model_class, parse_dtype, quiet
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError

if TYPE_CHECKING:
    from hf_fsdp_tools import SaveReport


def add_export(commands: Any) -> None:
    """Add the command `export`."""
    about = "write a training state as a Hugging Face checkpoint, on CPUs and in little memory"
    more = (
        "STATE is a folder that Accelerate's save_state, the Trainer (checkpoint-500), torch.distributed.checkpoint or "
        "this package saved, from any number of ranks; or a checkpoint that is to be cast or cut into other files. The "
        "result is what save_pretrained would have written in the training. Tokenizer files beside STATE are copied."
    )
    parser = commands.add_parser("export", help=about, description=f"{about}. {more}")
    parser.add_argument("source", metavar="STATE", help="folder of the training state; or a hub name")
    _add_arguments(parser)
    parser.set_defaults(run=partial(_run, "export"), base=None)


def add_merge(commands: Any) -> None:
    """Add the command `merge`."""
    about = "merge a PEFT adapter into its base and write a Hugging Face checkpoint, on CPUs and in little memory"
    more = (
        "The result is that of PEFT's merge_and_unload, bit for bit, in the dtype of the base. An adapter that was "
        "trained on a base in 4 bits (QLoRA) is merged into the plain base. Tokenizer files of the adapter, or else of "
        "the base, are copied."
    )
    parser = commands.add_parser("merge", help=about, description=f"{about}. {more}")
    parser.add_argument("source", metavar="ADAPTER", help="folder with adapter_config.json, or a hub name")
    parser.add_argument("--base", metavar="NAME", help="hub name or folder of the base (default: what ADAPTER names)")
    _add_arguments(parser)
    parser.set_defaults(run=partial(_run, "merge"))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="OUT", help="new folder; an earlier checkpoint there stays until all is written")
    add("--dtype", metavar="DTYPE", help="of the weights in OUT, such as bfloat16 (default: as they are)")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="largest weight file (default: %(default)s)")
    add("--processes", type=int, metavar="N", help="processes to share the work (default: by cores, memory and size)")
    add(
        "--config",
        metavar="NAME",
        help="folder, config.json or hub name of the model's config, if not beside the weights",
    )
    add_model_class(add)
    add("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    add("--subfolder", metavar="NAME", help="folder within the checkpoint")
    add("--allow-pickle", action="store_true", help="read legacy .bin files (no code of theirs is run)")
    add("--json", action="store_true", help="print one JSON value instead of text")


def _work(command: str, source: str, folder: Path, arguments: dict[str, Any]) -> "SaveReport":
    """Export or merge; every rank must call."""
    from hf_fsdp_tools import export_checkpoint, merge_adapter

    quiet()
    write: Callable[..., SaveReport] = export_checkpoint if command == "export" else merge_adapter
    with _own_warnings():
        return write(source, folder, **arguments)


def _num_bytes(source: str, arguments: dict[str, Any]) -> int:
    """Bytes of the checkpoint that is read."""
    from hf_fsdp_tools import open_checkpoint

    quiet()
    names = ("config", "allow_pickle", "trust_remote_code", "revision", "subfolder")
    given = {name: value for name, value in arguments.items() if name in names}
    return open_checkpoint(source, **given).index.num_bytes


@contextmanager
def _tidied_up() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does, so that the hidden folder goes and no process is left."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@_tidied_up()
def _run(command: str, options: argparse.Namespace) -> int:
    from hf_fsdp_tools.distributed.processes import launched_ranks, num_processes_for, run_on_processes

    if options.processes is not None and options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: give 1 or more")
    arguments = {
        "dtype": parse_dtype(options.dtype),
        "max_shard_size": options.max_shard_size,
        "config": options.config,
        "auto_class": options.auto_class,
        "allow_pickle": options.allow_pickle,
        "trust_remote_code": options.trust_remote_code,
        "progress": sys.stderr.isatty(),
    }
    arguments |= {name: value for name in ("revision", "subfolder") if (value := getattr(options, name)) is not None}
    arguments |= {"base": options.base} if command == "merge" else {}
    work = partial(_work, command, options.source, options.folder, arguments)
    with launched_ranks() as ranks:
        if ranks is not None:
            if options.processes is not None:
                raise ConfigError("--processes: the launcher has started the processes already; leave it out")
            try:
                report = work()
            except FSDPToolsError:
                if ranks[0] > 0:  # the same as on rank 0, which shows it
                    return 1
                raise
            if ranks[0] == 0:
                _print(report, ranks[1], options)
            return 0
    read = options.source if options.base is None else options.base
    size = options.processes or num_processes_for(_num_bytes(read, arguments))
    _print(run_on_processes(work, size), size, options)
    return 0


def _print(report: "SaveReport", size: int, options: argparse.Namespace) -> None:
    from hf_fsdp_tools.text import show_bytes

    beside = sorted(
        path.name
        for path in Path(report.folder).iterdir()
        if path.name not in report.files and not path.name.startswith(".")
    )
    if options.json:
        print(json.dumps(asdict(report) | {"source": options.source, "beside": beside, "processes": size}, indent=1))
        return
    count = len(report.files)
    speed = f", {report.total_bytes / report.seconds / 1e9:.2f} GB/s" if report.total_bytes > 1e8 else ""
    print(f"wrote   {report.folder}  ({count} weight file{'s' * (count != 1)}, {show_bytes(report.total_bytes)})")
    print(f"beside  {', '.join(beside)}")
    print(f"took    {report.seconds:.1f} s{speed}, {size} process{'es' * (size != 1)}")


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Show warnings of this package, one line each, and none of the libraries'."""
    own = str(Path(__file__).parents[1])

    def show(message: Any, category: type[Warning], filename: str, *_: object) -> None:
        if filename.startswith(own):
            print(f"hf-fsdp: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]  # it takes more than it needs
        yield
