"""The data sets of the recipes' demos, all made of CPython's own documentation."""

from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import going_first
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting.demo import make_demo_model, write_demo_dataset

__all__ = ["make_demo"]

_FOLDER = Path("outputs", "demo")


def make_demo(accelerator: Any, kind: str) -> tuple[str, str]:
    """The folders of a small model and of a data set, written by one rank of each node, the others wait for it.

    Args:
        accelerator: of `make_accelerator`.
        kind: "text".

    Every rank must call.
    """
    accelerator.print("Quick start: a small Llama and its data, made on the spot (give --model_name_or_path for yours)")
    with going_first(rank_on_node()[0] == 0):
        if rank_on_node()[0] == 0:
            if kind != "text":
                raise ConfigError(f"There is no demo of the kind {kind!r}.")
            make_demo_model(_FOLDER / "model")
            write_demo_dataset(_FOLDER / kind)
    return str(_FOLDER / "model"), str(_FOLDER / kind)
