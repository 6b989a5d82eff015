"""The command `hf-fsdp export`: a training state, or a base with its adapter, as a Hugging Face checkpoint."""

import argparse
import json
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.options import add_class_and_json, examples
from hf_fsdp_tools.errors import FSDPToolsError, warn

if TYPE_CHECKING:
    from hf_fsdp_tools.saving.publish import SaveReport


def add_export(commands: Any) -> None:
    """Add the command `export`."""
    about = "write a training state as a Hugging Face checkpoint, or merge an adapter into its base, in little memory"
    more = (
        "STATE is a folder that Accelerate's save_state, the Trainer (checkpoint-500), torch.distributed.checkpoint or "
        "this package saved, from any number of ranks; or a checkpoint that is to be cast or cut into other files. The "
        "result is what save_pretrained would have written in the training, with --adapter that of PEFT's "
        "merge_and_unload, bit for bit, in the dtype of the base. Tokenizer files next to STATE are copied. Under "
        "torchrun the processes share the work."
    )
    epilog = examples(
        "export output/checkpoint-500 model",
        "export Qwen/Qwen3-8B merged --adapter lora",
        "export merged --adapter lora",
    )
    parser = commands.add_parser("export", help=about, description=f"{about}. {more}", epilog=epilog)
    add = parser.add_argument
    add("source", metavar="STATE", nargs="?", help="training state or base (default: the adapter's base)")
    add("folder", type=Path, metavar="OUT", help="folder to write; what is there stays until all is written")
    add("--adapter", metavar="NAME", help="adapter to merge: a folder with adapter_config.json, or a hub name")
    add("--force", action="store_true", help="merge into another base than the one that the adapter names")
    add("--dtype", metavar="DTYPE", help="dtype of the weights, such as bfloat16 (default: as they are)")
    add("--keep-stored-format", action="store_true", help="merge into a quantised base, and quantise again")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="largest weight file (default: %(default)s)")
    add("--no-heads", action="store_false", dest="carry_heads", help="leave out heads that transformers ignores (MTP)")
    add("--config", metavar="NAME", help="model's config, where it is not next to the weights")
    add("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    add("--subfolder", metavar="NAME", help="folder within the checkpoint")
    add("--allow-pickle", action="store_true", help="read legacy .bin files (no code of theirs is run)")
    add_class_and_json(add)
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from hf_fsdp_tools.distributed.mesh import ensure_process_group

    # SIGTERM interrupts as Ctrl-C does, so that the hidden folder goes.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    ensure_process_group("cpu")  # of the ranks that a launcher has started, or of this process
    is_first = dist.get_rank() == 0
    try:
        report = _write(options)
    except FSDPToolsError:
        if is_first:
            raise
        return 1  # rank 0 shows the same error
    finally:
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()
    if is_first:
        _print(report, options)
    return 0


def _write(options: argparse.Namespace) -> "SaveReport":
    """Export or merge; every rank must call."""
    from hf_fsdp_tools import export_checkpoint
    from hf_fsdp_tools.modeling.arguments import as_dtype

    names = ["adapter", "max_shard_size", "config", "auto_class", "allow_pickle", "trust_remote_code"]
    names += ["revision", "subfolder", "carry_heads", "keep_stored_format", "force"]
    keywords = {name: value for name in names if (value := getattr(options, name)) is not None}
    keywords |= {"dtype": as_dtype(options.dtype, "--dtype"), "progress": sys.stderr.isatty()}
    with _own_warnings():
        return export_checkpoint(options.source, options.folder, **keywords)


def _print(report: "SaveReport", options: argparse.Namespace) -> None:
    from hf_fsdp_tools.text import show_bytes

    names = (path.name for path in Path(report.folder).iterdir() if not path.name.startswith("."))
    other_files = sorted(set(names) - set(report.files))
    if options.json:
        print(json.dumps(asdict(report) | {"source": options.source, "other_files": other_files}, indent=1))
        return
    count = len(report.files)
    speed = f", {report.total_bytes / report.seconds / 1e9:.2f} GB/s" if report.total_bytes > 1e8 else ""
    print(f"wrote   {report.folder}  ({count} weight file{'s' * (count != 1)}, {show_bytes(report.total_bytes)})")
    print(f"also    {', '.join(other_files)}")
    if report.requantized:
        print(f"again   {report.error_of_quantizing()}")
    print(f"took    {report.seconds:.1f} s{speed}")


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Show warnings of this package, one line each, and none of the libraries'."""
    import huggingface_hub
    import transformers

    def show(message: Any, *_: object) -> None:
        if any(frame.f_code is warn.__code__ for frame, _ in walk_stack(sys._getframe())):
            print(f"hf-fsdp: warning: {message}", file=sys.stderr)

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]  # it takes more than it needs
        yield
