"""Weights as a stream: the parts of all ranks make up the checkpoint exactly once; buckets."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PromptTuningConfig
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import BitsAndBytesConfig

from hf_fsdp_tools import ConfigError, add_adapter, from_pretrained, live_weights, save_pretrained
from hf_fsdp_tools.steps import load_weights, make_wrap_plan
from tests._checkpoints import (
    assert_same_tensors,
    loaded,
    make_quantized,
    plain_model,
    refusal,
    sharded_meta_model,
    small_llama,
    stored_tensors,
)  # fmt: skip
from tests._dist import run_cases, run_ranks
from tests._noted import calls_of
from tests.api import LiveWeights, WithHeads, all_ranks, patched, plain_view, wrap_fsdp1
from tests.ranks.test_load import last_even_dim

MOE = {"experts_implementation": "batched_mm"}
QUIET = {"load_kwargs": {"progress": False}}


def replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def parts_make_up(weights: LiveWeights, saved: dict[str, torch.Tensor], what: str) -> None:
    """The union of all ranks' parts is each saved tensor, each element once; names, shapes and dtypes are equal."""
    assert {k: (t.shape, t.dtype) for k, t in weights.tensors.items()} == {
        k: (tuple(t.shape), t.dtype) for k, t in saved.items()
    }, what
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(part.name, part.box, part.values()) for part in weights.parts()])
    if dist.get_rank():
        return  # all have the same
    found = {k: torch.zeros(t.symbol.shape, dtype=t.element) for k, t in weights.tensors.items()}
    times = {k: torch.zeros(t.symbol.shape, dtype=torch.int32) for k, t in weights.tensors.items()}
    for name, box, values in (part for parts in every for part in parts):
        found[name][box.slices] = values
        times[name][box.slices] += 1
    assert not [name for name, count in times.items() if bool((count != 1).any())], what
    assert_same_tensors({k: t.as_stored(found[k]) for k, t in weights.tensors.items()}, saved, what)


def buckets_hold(weights: LiveWeights, saved: dict[str, torch.Tensor], what: str) -> None:
    """Whole tensors arrive where they are asked for, in the order of the names, in buckets of bounded size."""
    largest = max(tensor.num_bytes for tensor in weights.tensors.values())
    rank, size = dist.get_rank(), dist.get_world_size()
    for to, bound in (((0,), 3 * largest), (None, 4 * largest), ((size - 1, 0), 2**30)):
        arrived: list[str] = []
        for bucket in weights.buckets(bound, to=to):
            assert sum(t.nbytes for t in bucket.values()) <= max(largest, bound // 2), what
            assert_same_tensors(bucket, {name: saved[name] for name in bucket}, what)
            arrived += bucket
        assert arrived == (list(weights.tensors) if to is None or rank in to else []), what
        (plan,) = weights._plans.values()
        assert all(bucket.most_bytes <= bound for bucket in plan)


def placements(folders: dict[str, Path], tmp: Path) -> None:
    """FSDP2 with empty shards, other dimensions, and FSDP1; fp32 and bf16."""
    with pytest.warns(FutureWarning):
        plain = plain_model("llama", folders["llama"])
        flat = plain_view(wrap_fsdp1(plain, make_wrap_plan(plain)))
    made = {kind: loaded(kind, folders[kind]) for kind in ("t5", "qwen2_moe")}
    made |= {"columns": loaded("gpt2", folders["gpt2"], shard_placement_fn=last_even_dim), "one unit": flat}
    for number, (what, model) in enumerate(made.items()):
        dtype = (None, torch.bfloat16)[number % 2]
        save_pretrained(model, tmp / what, dtype=dtype)
        saved, weights = stored_tensors(tmp / what), live_weights(model, dtype=dtype)
        parts_make_up(weights, saved, what)
        if what != "t5":
            buckets_hold(weights, saved, what)


def replicas_share(folders: dict[str, Path], tmp: Path) -> None:
    model = loaded("llama", folders["llama"], mesh=replicas())
    with patched(_MIN_PART_BYTES=64):
        weights = live_weights(model)
        parts_make_up(weights, stored_tensors(folders["llama"]), "replicas that share")
        given = all_ranks(sum(part.num_bytes for part in weights.parts()))
    assert max(given) < 0.35 * sum(given), given


def filled(model: Any, value: float) -> Any:
    """The model, whose adapters are not what they begin with."""
    for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data.fill_(value * (i + 1))
    return model


def adapters_alone_and_merged(folders: dict[str, Path], tmp: Path) -> None:
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    lora = LoraConfig(r=3, task_type="CAUSAL_LM", **targets)
    model = filled(from_pretrained(folders["mixtral"], peft_config=lora, **MOE, **QUIET), 0.01)
    merged = live_weights(model, merge_adapters=True)
    filled(model, 0.02)
    save_pretrained(model, tmp / "later")
    save_pretrained(model, tmp / "merged", merge_adapters=True)
    for what, weights, saved in (
        ("adapter", live_weights(model), load_file(tmp / "later" / "adapter_model.safetensors")),
        ("merged, after a step", merged, stored_tensors(tmp / "merged")),
    ):
        parts_make_up(weights, saved, what)
        buckets_hold(weights, saved, what)
    model = from_pretrained(folders["llama"], **QUIET)
    model = add_adapter(model, PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert "has no tensors to stream" in refusal(lambda: live_weights(model))


def bases_that_stay_quantised(folders: dict[str, Path], tmp: Path) -> None:
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    for kind in ("gptq", "nf4"):
        if kind == "nf4" and find_spec("bitsandbytes") is None:
            continue
        if dist.get_rank() == 0:
            small_llama(tmp / kind) if kind == "nf4" else make_quantized(kind, tmp / kind)
        dist.barrier()
        packed = {"quantization_config": four} if kind == "nf4" else {"dequantize": False}
        model = from_pretrained(tmp / kind, **packed, **QUIET)
        save_pretrained(model, tmp / f"{kind} again")
        saved, beside = stored_tensors(tmp / f"{kind} again"), WithHeads.of(model).heads
        if beside is not None:  # what a save copies from the files that were loaded, such as scales of inputs
            saved = {key: saved[key] for key in saved.keys() - beside.stored.tensors.keys()}
        weights = live_weights(model)
        parts_make_up(weights, saved, kind)
        buckets_hold(weights, saved, kind)


def sent_bytes(calls: Any) -> int:
    return sum(each.tensor.nbytes for each in calls if each.op is dist.isend)


def nothing_is_sent_twice(folders: dict[str, Path], tmp: Path) -> None:
    """What is sent to two ranks is what they lack; memory stays in one bucket."""
    rank = dist.get_rank()
    for kind in ("mixtral", "gpt2"):
        weights = live_weights(loaded(kind, folders[kind]))
        largest = max(tensor.num_bytes for tensor in weights.tensors.values())
        sizes = calls_of(dist, "batch_isend_irecv", lambda _, calls: sent_bytes(calls))
        with sizes as sent:
            for bucket in weights.buckets(4 * largest, to=(0, 1)):
                assert sum(t.nbytes for t in bucket.values()) <= 4 * largest
        held = [part.num_bytes for part in weights.parts()] if rank < 2 else []
        lacking = sum(all_ranks(weights.num_bytes - sum(held) if rank < 2 else 0))
        assert sum(all_ranks(sum(sent))) == lacking, "no byte is sent twice, and none that is there already"


# ---- faults ----


def faults(folders: dict[str, Path], tmp: Path) -> None:
    rank = dist.get_rank()
    model = sharded_meta_model("llama", folders["llama"])
    assert "are on meta" in refusal(lambda: live_weights(model))
    load_weights(model, folders["llama"], progress=False)
    assert "dtype" in refusal(lambda: live_weights(model, dtype=(torch.bfloat16, torch.float16)[rank % 2]), ConfigError)
    weights = live_weights(model)
    said = refusal(lambda: list(weights.buckets(100)), ConfigError)
    assert "bucket_bytes=100 does not hold" in said and "give bucket_bytes=" in said
    assert "rank 9 is to get" in refusal(lambda: list(weights.buckets(to=(9,))), ConfigError)
    assert "different arguments" in refusal(lambda: list(weights.buckets(2**20 + rank)), ConfigError)
    used: list[str] = []
    largest = max(tensor.num_bytes for tensor in weights.tensors.values())

    def dies(bucket: dict[str, torch.Tensor]) -> None:
        used.extend(bucket)
        if rank == 1 and len(used) > 4:
            raise ConfigError("the server is away")

    for to in (None, (1,)):
        used.clear()
        exchanges, sends = (calls_of(dist, name, lambda made, *_: made) for name in ("batch_isend_irecv", "broadcast"))
        with exchanges as lists, sends as single:
            said = refusal(lambda to=to: weights.send(dies, 4 * largest, to=to), ConfigError)
        assert "rank 1: the server is away" in said and (rank != 1 or 4 < len(used) < len(weights.tensors)), used
        begun = [*single, *(work for works in lists for work in works)]
        assert begun and all(work.is_completed() for work in begun), "cut off, it would reach the next pass"
    used.clear()
    weights.send(lambda bucket: used.extend(bucket), 2 * largest)
    assert used == (list(weights.tensors) if rank == 0 else []), "the next pass is whole"


ON_THREE = (placements, adapters_alone_and_merged, bases_that_stay_quantised, nothing_is_sent_twice, faults)


@pytest.mark.parametrize(("ranks", "cases"), [(3, ON_THREE), (4, [replicas_share])], ids=["on three", "on four"])
def test_the_weights_of_a_model_under_the_names_of_its_checkpoint(ranks, cases, folders, tmp_path):
    run_ranks(run_cases, ranks, cases, folders, tmp_path)
