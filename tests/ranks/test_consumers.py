"""Weights for vLLM, and by the examples for SGLang and verl: what arrives is the checkpoint, and what goes wrong is one
error on all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig

from hf_fsdp_tools import ConfigError, RanksError, from_pretrained, live_weights, save_pretrained
from hf_fsdp_tools.extensions.vllm import update_vllm, weight_source
from tests._checkpoints import assert_same_tensors, full_state, loaded, plain_model, refusal, stored_tensors
from tests._consumers import Engine, SGLangServer, VLLMServer, stand_ins
from tests._dist import named, run_cases, run_ranks
from tests._documents import blocks
from tests.api import LiveWeights, all_ranks
from tests.ranks.test_live_weights import MOE, QUIET, filled

Tensors = dict[str, torch.Tensor]
DOCS = Path(__file__).parents[2] / "docs"


def step(model: Any) -> None:
    tokens = torch.arange(24).reshape(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.zero_grad()


def adapted(folder: Path) -> Any:
    lora = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=["experts.down_proj"], task_type="CAUSAL_LM")
    return filled(from_pretrained(folder, peft_config=lora, **MOE, **QUIET), 0.01)


def saved_as(model: Any, weights: LiveWeights, folder: Path) -> Tensors:
    """What `save_pretrained` writes at this moment. Every rank must call."""
    dtype = next(iter(weights.tensors.values())).dtype
    save_pretrained(model, folder, dtype=dtype, merge_adapters=hasattr(model, "peft_config"))
    return stored_tensors(folder)


def to_vllm(folders: dict[str, Path], tmp: Path) -> None:
    """All tensors in the order of the metadata, each call a fresh pass, of the values of its moment."""
    rank, model = dist.get_rank(), adapted(folders["mixtral"])
    weights = live_weights(model, dtype=torch.bfloat16, merge_adapters=True)
    largest = max(t.num_bytes for t in weights.tensors.values())
    source = weight_source(weights, bucket_bytes=3 * largest)
    assert source.metadata is source.metadata and source.owned_names(1) == []
    for number in range(2):
        saved = saved_as(model, weights, tmp / f"vllm {number}")
        assert {m.name: (m.dtype, tuple(m.shape)) for m in source.metadata} == {
            name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in saved.items()
        }
        update_vllm(Engine(source, rank, server := VLLMServer()))
        assert_same_tensors(server.tensors, saved if rank == 0 else {}, "vLLM")
        step(model)
    saved = saved_as(model, weights, tmp / "everywhere")
    everywhere = weight_source(weights, to=None, bucket_bytes=4 * largest)
    assert all(tuple(m.owners) == tuple(range(dist.get_world_size())) for m in everywhere.metadata)
    whole, local = list(everywhere.iter_full()), list(everywhere.iter_local())
    assert everywhere.owned_names(rank) == [name for name, _ in whole] == [name for name, _ in local]
    assert_same_tensors(dict(whole), saved)
    assert_same_tensors(dict(local), saved)


def what_goes_wrong_at_vllm(folders: dict[str, Path], tmp: Path) -> None:
    rank, weights = dist.get_rank(), live_weights(loaded("llama", folders["llama"]))
    source = weight_source(weights, bucket_bytes=3 * max(t.num_bytes for t in weights.tensors.values()))
    with pytest.raises(ConfigError if rank == 0 else RanksError, match="500 Server Error") as caught:
        update_vllm(Engine(source, rank, VLLMServer(fails_at=2)))
    del caught
    update_vllm(Engine(source, rank, server := VLLMServer()))
    assert_same_tensors(server.tensors, stored_tensors(folders["llama"]) if rank == 0 else {}, "the next pass is whole")
    for to in ((), (0, 3)):
        assert "ranks 0 to 2" in refusal(partial(weight_source, weights, to=to), ConfigError)
    alone = live_weights(adapted(folders["mixtral"]))
    assert "merge_adapters=True" in refusal(partial(weight_source, alone), ConfigError)


def example(name: str) -> dict[str, Any]:
    return run_path(str(DOCS / "examples" / f"{name}_weights.py"))


@contextmanager
def servers(saved: Tensors) -> Iterator[tuple[list[str], SGLangServer | None]]:
    """A server in the process of rank 1, and one in that of rank 2: their urls, and this rank's own."""
    own = SGLangServer(saved) if dist.get_rank() in (1, 2) else None
    urls = [url for url in all_ranks(own and own.url) if url]
    try:
        yield urls, own
    finally:
        dist.barrier()
        if own is not None:
            own.stop()


def to_sglang(folders: dict[str, Path], tmp: Path) -> None:
    """In a bucket, each tensor begins where its dtype may begin."""
    model = plain_model("llama", folders["llama"], dtype=torch.bfloat16)
    model.model.norm.float()
    model.lm_head.float()
    saved = {name: tensor.detach() for name, tensor in full_state(model).items()}
    with servers(saved) as (urls, own):
        client = example("sglang")["SGLangServers"](live_weights(model), urls, backend="gloo", timeout_s=60)
        for version in ("1", "2"):
            if own is not None:
                own.tensors.clear()
            client.update(version)
            dist.barrier()
            if own is not None:
                assert_same_tensors(own.tensors, saved, "SGLang")
                assert own.version == version and not own.is_open and not own.is_paused
        assert own is None or own.asked.count("init_weights_update_group") == 1


def to_verl(folders: dict[str, Path], tmp: Path) -> None:
    engine = example("verl")["StreamingEngine"](adapted(folders["mixtral"]))
    engine.initialize()
    found = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    assert_same_tensors(found, saved_as(engine.module, engine.weights, tmp / "verl"), "verl")


def the_page(folders: dict[str, Path], tmp: Path) -> None:
    """Every block runs as it stands, but for the names of machines, and does what its section says."""
    live, whole = (block.text for block in blocks("docs/weight_streaming.md", "python"))
    rank, model = dist.get_rank(), from_pretrained(folders["mixtral"], **MOE, **QUIET)
    taken: Tensors = {}
    given = {"model": model, "rank": rank, "train_a_step": step, "take": taken.update}
    names: dict[str, Any] = given | {"seen": {}}
    exec(live, names)
    weights = names["weights"]
    assert names["seen"] == ({n: t.shape for n, t in weights.tensors.items()} if rank == 0 else {})
    assert list(taken) == list(names["seen"])
    exec(whole, names := dict(given))
    saved = saved_as(model, weights, tmp / "page 1")
    assert_same_tensors(names["engine"].server.tensors, saved if rank == 0 else {}, "vLLM")


CASES = named(to_vllm, what_goes_wrong_at_vllm, to_sglang, to_verl, the_page)


def consume(cases: dict[str, Any], folders: dict[str, Path], tmp: Path) -> None:
    with stand_ins():
        run_cases(cases, folders, tmp)


def test_consumers_get_the_checkpoint(folders, tmp_path):
    run_ranks(consume, 3, CASES, folders, tmp_path)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_own_classes_take_it(folders, tmp_path):
    run_ranks(run_cases, 4, [to_vllm], folders, tmp_path)
