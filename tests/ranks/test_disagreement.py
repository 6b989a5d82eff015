"""Ranks that open different files or give different arguments stop with one error on all, and none waits."""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_fsdp_tools import (
    ConfigError,
    FSDPPlugin,
    ParallelDims,
    TrainerSettings,
    WrapPolicy,
    from_pretrained,
    make_accelerator,
    save_pretrained,
)
from hf_fsdp_tools.loading import load as loading
from hf_fsdp_tools.loading import opening
from hf_fsdp_tools.steps import load_weights, make_wrap_plan, shard_model
from tests._checkpoints import make_checkpoint, make_model, make_quantized, refusal, sharded_meta_model, small_llama
from tests._dist import named, run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, make_rows
from tests.api import CheckpointIndex, Rounds

LISTINGS = ("scandir", "listdir")


def mine(first: Any, second: Any) -> Any:
    return second if dist.get_rank() else first


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copies")
    good = make_checkpoint("llama", root / "good")
    shutil.copytree(good, root / "equal", copy_function=shutil.copyfile)
    config = Path(shutil.copytree(good, root / "other config"), "config.json")
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
    file = sorted(shutil.copytree(good, root / "other header").glob("*.safetensors"))[0]
    tensors = load_file(file)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file, {"format": "pt"})
    return root


def other_config(root: Path) -> None:
    message = refusal(lambda: from_pretrained(mine(root / "good", root / "other config")))
    assert message.startswith(f"{str(root / 'good')!r} is not the same on all nodes: its config is "), message
    assert message.count(f"(host {os.uname().nodename}) on rank ") == 2
    assert "copy one folder to all nodes again" in message


def other_header_or_equal_copies(root: Path) -> None:
    for load in (from_pretrained, lambda folder: load_weights(sharded_meta_model("llama", root / "good"), folder)):
        message = refusal(lambda load=load: load(mine(root / "good", root / "other header")))
        assert "is not the same on all nodes: its header of the weight files is " in message
    index = CheckpointIndex.open(mine(root / "good", root / "other header"))
    message = refusal(lambda: load_weights(sharded_meta_model("llama", root / "good"), index))
    assert "different arguments: checkpoint.header of the weight files is " in message
    from_pretrained(mine(root / "good", root / "equal"))


def loading_looks_once_and_needs_no_collective_and_saving_a_mask(root: Path) -> None:
    """A load lists the folder once, and compares its contents once, in five rounds.

    A save compares, in one all-reduce of a byte for each tensor, which tensors some rank cannot write in place.
    """
    mesh, reduced = ParallelDims().build_mesh("cpu"), []
    with ExitStack() as stack:
        for name in ("all_gather_object", "broadcast_object_list", "gather_object", "all_reduce", "broadcast", "send"):
            stack.enter_context(patch.object(dist, name, side_effect=AssertionError(f"{name} was called")))
        listings = [stack.enter_context(patch.object(os, name, wraps=getattr(os, name))) for name in LISTINGS]
        rounds = stack.enter_context(patch.object(Rounds, "exchange", autospec=True, side_effect=Rounds.exchange))
        comparing = patch.object(opening, "refuse_other_contents", wraps=opening.refuse_other_contents)
        with comparing as compared, patch.object(loading, "refuse_other_contents", compared):
            model = from_pretrained(root / "good", mesh=mesh)
        listed = [str(call.args[0]) for listing in listings for call in listing.call_args_list]
        assert [path for path in listed if path.startswith(str(root))] == [str(root / "good")]
        assert compared.call_count == 1 and rounds.call_count == 5
        stack.enter_context(patch.object(dist, "all_reduce", lambda values, *_: reduced.append(values)))
        save_pretrained(model, root / "saved")
    assert [(mask.dtype, mask.device.type) for mask in reduced] == [(torch.uint8, "cpu")]
    assert len(reduced[0]) == len(list(model.state_dict()))


FILES = (loading_looks_once_and_needs_no_collective_and_saving_a_mask, other_config, other_header_or_equal_copies)


def test_copies_that_differ_are_refused(copies: Path) -> None:
    run_ranks(run_cases, 2, FILES, copies)


DIFFERING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": ({}, {"dtype": "bfloat16"}, r'dtype is null on rank 0, "torch.bfloat16" on rank 1'),
    "mp_policy": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        r'mp_policy.reduce_dtype is null on rank 0, "torch.float32" on rank 1. Give the same on every rank',
    ),
    "policy": ({}, {"policy": WrapPolicy(reshard_after_forward={"*": False})}, "policy"),
    "staging_bytes": ({}, {"load_kwargs": {"staging_bytes": 2**21}}, "load_kwargs.staging_bytes is not given"),
    "peft_config": (
        {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
        {"peft_config": LoraConfig(r=8, target_modules=["q_proj", "v_proj"])},
        "peft_config.r is 4 on rank 0, 8 on rank 1",
    ),
    "num_tokens": ({"num_tokens": 80}, {}, "num_tokens is 80 on rank 0, null on rank 1"),
    "seed": ({"load_kwargs": {"seed": 1}}, {"load_kwargs": {"seed": 2}}, "load_kwargs.seed is 1 on rank 0, 2 on"),
    "a misspelt argument": ({}, {"device_map": "auto"}, "rank 1: from_pretrained cannot honour device_map='auto'"),
}  # fmt: skip


def give_other_arguments(folder: Path, name: str) -> None:
    first, second, expected = DIFFERING[name]
    assert expected in refusal(lambda: from_pretrained(folder, **mine(first, second)), ConfigError)


def other_staging_bytes_dtypes_and_functions(folder: Path) -> None:
    model = sharded_meta_model("llama", folder)
    message = refusal(lambda: load_weights(model, folder, staging_bytes=mine(2**21, 5)), ConfigError)
    assert "rank 1: staging_bytes is 5; it must be at least 1048576" in message
    load_weights(model, folder)
    model = make_model("llama", dtype=mine(torch.float32, torch.bfloat16))
    mesh = ParallelDims().build_mesh("cpu")
    assert "parameters.bfloat16" in refusal(lambda: shard_model(model, make_wrap_plan(model), mesh=mesh), ConfigError)
    from_pretrained(folder, policy=WrapPolicy(units=(lambda fqn, module: None,)), auto_class=AutoModelForCausalLM)


def test_arguments_that_differ_are_named(copies: Path) -> None:
    cases: dict[str, Callable[..., None]] = {name: partial(give_other_arguments, name=name) for name in DIFFERING}
    run_ranks(run_cases, 2, cases | named(other_staging_bytes_dtypes_and_functions), copies / "good")


# ---- what does not go together (docs/compatibility.md) ----

LORA = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def fsdp1_and_ranks_that_share(name: str, folder: Path) -> None:
    shared = ParallelismConfig(**{name: 2})
    plugin = FSDPPlugin(fsdp_version=1)
    said = refusal(lambda: make_accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=shared))
    assert f"{name} above 1 needs FSDP2" in said, said


def quantised_weights_in_parts(folder: Path) -> None:
    options = {"mesh": ParallelDims(tp_size=2), "peft_config": LORA, "load_kwargs": {"progress": False}}
    said = refusal(lambda: from_pretrained(folder / "fp8", dequantize=False, num_tokens=132, **options))
    assert "k_proj.weight is stored in blocks of 8, through which 2 parts of its 24 indices would cut" in said, said
    if find_spec("bitsandbytes") is not None:
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        said = refusal(lambda: from_pretrained(folder / "small", quantization_config=four, num_tokens=132, **options))
        assert "flattened before bitsandbytes packs it, so ranks cannot share it" in said, said


def averages_of_flat_parameters(folder: Path) -> None:
    class Averaging(ShardedTrainer):
        fsdp_settings = TrainerSettings(ema_decay=0.9)

    args = arguments(folder / "run", max_steps=1, fsdp=True, fsdp_config={"version": 1})
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    said = refusal(lambda: Averaging(model=model, args=args, train_dataset=make_rows(8)).train())
    assert "ema_decay needs FSDP2" in said, said


CASES = {
    "FSDP1, tp": partial(fsdp1_and_ranks_that_share, "tp_size"),
    "FSDP1, cp": partial(fsdp1_and_ranks_that_share, "cp_size"),
    "stays quantised, tp": quantised_weights_in_parts,
    "FSDP1, averages": averages_of_flat_parameters,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "llama")
    make_quantized("fp8", tmp_path / "fp8")
    small_llama(tmp_path / "small")
    run_ranks(run_cases, 2, CASES, tmp_path)
