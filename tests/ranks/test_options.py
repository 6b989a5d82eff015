"""Options act in every layout, however a model is called: what they do is counted; losses are those of one process."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ParallelDims, WrapPolicy, from_pretrained
from hf_fsdp_tools.sharding import recompute
from tests._checkpoints import RELEASE, randomize, tiny_config
from tests._dist import run_cases, run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "usual": {"mesh": ParallelDims()},
    "kept": {"mesh": ParallelDims(), "policy": WrapPolicy(reshard_after_forward={"*": False})},
    "offload": {"mesh": ParallelDims(), "offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "rows": {"mesh": ParallelDims(cp_size=2)},
    "layers": {"mesh": ParallelDims(tp_size=2)},
    "experts": {"mesh": ParallelDims(ep_size=2)},
}
IDS = torch.arange(3, 27).view(2, 12)
BLOCKS = 4
NORM, PRODUCT = torch.ops.aten.rsqrt.default, torch.ops.aten.mm.default


class Seen(TorchDispatchMode):
    """Counts operators, and the dtypes of what products of matrices multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[Any] = Counter()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[operator] += 1
        if operator is PRODUCT:
            self.dtypes |= {each.dtype for each in args}
        return operator(*args, **(kwargs or {}))


@contextmanager
def counted_hosts() -> Iterator[list[int]]:
    """How many blocks' inputs went to host memory."""
    kept: list[int] = []
    make = recompute._Kept.__init__

    def noted(self: Any, *args: Any) -> None:
        kept.append(1)
        make(self, *args)

    with patch.object(recompute._Kept, "__init__", noted):
        yield kept


def step(folder: Path, layout: dict[str, Any], by_name: bool, **options: Any) -> tuple[float, Seen, int]:
    model: Any = from_pretrained(folder, **layout, load_kwargs={"progress": False}, **options).train()
    with counted_hosts() as kept, Seen() as seen:
        loss = model(input_ids=IDS, labels=IDS).loss if by_name else model(IDS, None, labels=IDS).loss
        loss.backward()
    return loss.item(), seen, len(kept)


def options_act(name: str, folders: dict[str, Path]) -> None:
    folder, layout = folders["mixture" if name == "experts" else "dense"], LAYOUTS[name]
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    expected = plain(input_ids=IDS, labels=IDS).loss.item()
    for by_name in (True, False):
        what = name, "by name" if by_name else "by place"

        def run(by_name: bool = by_name, **options: Any) -> tuple[Counter[Any], int]:
            loss, seen, kept = step(folder, layout, by_name, **options)
            assert loss == pytest.approx(expected, rel=1e-5), (what, options)  # noqa: B023  # called at once
            return seen.operators, kept

        usual, _ = run()
        norms = (usual[NORM] - 1) // BLOCKS  # of one block
        whole, kept = run(activation_checkpointing=True)
        assert whole[NORM] == usual[NORM] + norms * BLOCKS and whole[PRODUCT] > usual[PRODUCT] and not kept, what
        half, _ = run(activation_checkpointing={"every_n_layers": 2})
        assert half[NORM] == usual[NORM] + norms * BLOCKS // 2, what
        _, kept = run(activation_checkpointing={"offload": True})
        assert kept == BLOCKS, what
        saved, _ = run(activation_checkpointing={"save_ops": ("matmul",)})
        assert saved[NORM] == whole[NORM] and saved[PRODUCT] == usual[PRODUCT], what
        _, seen, _ = step(folder, layout, by_name, mp_policy="bf16")
        assert seen.dtypes == {torch.bfloat16}, what


def compiled_blocks(name: str, folders: dict[str, Path]) -> int:
    """How many graphs of blocks ran compiled."""
    ran = 0

    def backend(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal ran
            ran += 1
            return graph.forward(*args)

        return call

    torch._dynamo.reset()
    folder = folders["mixture" if name == "experts" else "dense"]
    options = {"compile": {"backend": backend}, "load_kwargs": {"progress": False}}
    model: Any = from_pretrained(folder, **LAYOUTS[name], **options).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return ran


def blocks_are_compiled(name: str, folders: dict[str, Path]) -> None:
    assert compiled_blocks(name, folders) >= BLOCKS, name


def names(ranks: int) -> list[str]:
    several = ["rows"] + ["layers", "experts"] * (RELEASE >= (5, 21))
    return [name for name in LAYOUTS if name in ("usual", "kept", "offload") or (ranks > 1 and name in several)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"dense": tmp_path_factory.mktemp("dense"), "mixture": tmp_path_factory.mktemp("mixture")}
    for name, folder in made.items():
        config = tiny_config("qwen3_moe" if name == "mixture" else "llama", 2)
        config.num_hidden_layers = BLOCKS
        randomize(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    return made


@pytest.mark.parametrize("ranks", [1, 2])
def test_options_act(ranks: int, folders: dict[str, Path]) -> None:
    cases = {
        f"{case.__name__} {name}": partial(case, name)
        for case in (options_act, blocks_are_compiled)
        for name in names(ranks)
    }
    run_ranks(run_cases, ranks, cases, folders)
