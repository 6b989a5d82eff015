"""Weights for vLLM, SGLang and verl: what arrives is the checkpoint, and what goes wrong is one error on all ranks."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ConfigError, RanksError, from_pretrained, live_weights, save_pretrained
from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.loading.load import load_weights
from hf_fsdp_tools.streaming.live import LiveWeights
from hf_fsdp_tools.streaming.sglang import SGLangServers
from hf_fsdp_tools.streaming.verl import delta_entries, shard_specs
from hf_fsdp_tools.streaming.vllm import sparse_patches, update_vllm, weight_source
from tests._checkpoints import (
    full_state,
    plain_model,
    randomize,
    refusal,
    sharded_meta_model,
    stored_tensors,
    tiny_config,
)
from tests._consumers import Engine, SGLangServer, VLLMServer, local_piece, stand_ins
from tests._dist import run_cases, run_ranks
from tests.ranks.test_live_weights import MOE, QUIET, assert_bits

Tensors = dict[str, torch.Tensor]
DOCUMENT = Path(__file__).parents[2] / "docs" / "weights.md"


def equal(found: Tensors, saved: Tensors, what: object) -> None:
    assert sorted(found) == sorted(saved), what
    for name, tensor in found.items():
        assert_bits(tensor, saved[name], (what, name))


def step(model: Any) -> None:
    tokens = torch.arange(24).reshape(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.zero_grad()


def models(folders: dict[str, Path], tmp: Path) -> Iterator[tuple[str, Any, LiveWeights]]:
    """Odd shards, even ones with replicas, experts that are cut out of stacks, tied tables, merged LoRA."""
    for kind in ("llama", "tied", "qwen3_moe"):
        model = sharded_meta_model(kind, folders[kind])
        load_weights(model, folders[kind], progress=False)
        yield kind, model, live_weights(model)
    if dist.get_rank() == 0:
        randomize(AutoModelForCausalLM.from_config(tiny_config("llama", 2))).save_pretrained(tmp / "even")
    dist.barrier()
    for names in (("replicate", "shard"), ("shard",)):
        mesh = init_device_mesh("cpu", (2, 2) if len(names) == 2 else (4,), mesh_dim_names=names)
        model = sharded_meta_model("llama", tmp / "even", mesh=mesh)
        load_weights(model, tmp / "even", progress=False)
        yield f"even, {names}", model, live_weights(model)
    model = adapted(folders["mixtral"])
    yield "lora", model, live_weights(model, dtype=torch.bfloat16, merge_adapters=True)


def adapted(folder: Path) -> Any:
    lora = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=["experts.down_proj"], task_type="CAUSAL_LM")
    model = from_pretrained(folder, peft_config=lora, **MOE, **QUIET)
    for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data.fill_(0.01 * (i + 1))
    return model


def saved_as(model: Any, weights: LiveWeights, folder: Path) -> Tensors:
    """What `save_pretrained` writes at this moment. Every rank must call."""
    dtype = next(iter(weights.tensors.values())).dtype
    save_pretrained(model, folder, dtype=dtype, merge_adapters=hasattr(model, "peft_config"))
    return stored_tensors(folder)


# ---- vLLM ----


def to_vllm(folders: dict[str, Path], tmp: Path) -> None:
    rank = dist.get_rank()
    for kind, model, weights in models(folders, tmp):
        saved = saved_as(model, weights, tmp / f"vllm {kind}")
        largest = max(t.num_bytes for t in weights.tensors.values())
        source = weight_source(weights, bucket_bytes=3 * largest)
        assert source.metadata is source.metadata and source.owned_names(1) == []
        assert [(m.name, m.dtype, tuple(m.shape)) for m in source.metadata] == [
            (name, saved[name].dtype, tuple(saved[name].shape)) for name in weights.tensors
        ]
        assert {m.name for m in source.metadata} == set(saved)
        server = VLLMServer()
        update_vllm(Engine(source, rank, server))
        equal(server.tensors, saved if rank == 0 else {}, kind)

        everywhere = weight_source(weights, to=None, bucket_bytes=4 * largest)
        assert all(tuple(m.owners) == (0, 1, 2, 3) for m in everywhere.metadata)
        whole, local = list(everywhere.iter_full()), list(everywhere.iter_local())
        names = everywhere.owned_names(rank)
        assert names == [name for name, _ in whole] == [name for name, _ in local] == list(weights.tensors)
        equal(dict(whole), saved, kind)
        pieces = {m.name: local_piece(saved[m.name], m, rank) for m in everywhere.metadata}
        equal(dict(local), pieces, kind)
        cut = sum(m.placements is not None for m in everywhere.metadata)
        assert (cut == len(saved)) if kind.startswith("even") else cut < len(saved), (kind, cut)
        assert kind not in ("qwen3_moe", "lora") or not any(
            ".experts." in m.name and m.placements is not None for m in everywhere.metadata
        )
        if kind == "llama":  # each call is a fresh pass, of the values of its moment
            step(model)
            update_vllm(Engine(source, rank, server))
            saved = saved_as(model, weights, tmp / "later")
            equal(server.tensors, saved if rank == 0 else {}, kind)


def patches_for_vllm(folders: dict[str, Path], tmp: Path) -> None:
    rank, server = dist.get_rank(), VLLMServer()
    model = from_pretrained(folders["mixtral"], **MOE, **QUIET)
    weights = live_weights(model, dtype=torch.bfloat16)
    changes = weights.changes()
    update_vllm(Engine(weight_source(weights), rank, server))
    engine = Engine(weight_source(weights), rank, server)
    assert sparse_patches(weights, changes) == []
    for _ in range(2):
        step(model)
        patches = sparse_patches(weights, changes)
        assert (rank == 0) == bool(patches) and all(p.full_shape == weights.tensors[p.name].shape for p in patches)
        update_vllm(engine, patches)
    saved = saved_as(model, weights, tmp / "patched")
    equal(server.tensors, saved if rank == 0 else {}, "patches")


def what_goes_wrong_at_vllm(folders: dict[str, Path], tmp: Path) -> None:
    rank = dist.get_rank()
    model = sharded_meta_model("llama", folders["llama"])
    load_weights(model, folders["llama"], progress=False)
    weights = live_weights(model)
    source = weight_source(weights, bucket_bytes=3 * max(t.num_bytes for t in weights.tensors.values()))
    begin_s = monotonic()
    with pytest.raises(ConfigError if rank == 0 else RanksError, match="500 Server Error") as caught:
        update_vllm(Engine(source, rank, VLLMServer(fails_at=2)))
    del caught
    assert monotonic() - begin_s < 30
    server = VLLMServer()
    update_vllm(Engine(source, rank, server))
    equal(server.tensors, stored_tensors(folders["llama"]) if rank == 0 else {}, "the next pass is whole")
    for to in ((), (0, 4)):
        assert "ranks 0 to 3" in refusal(lambda to=to: weight_source(weights, to=to), ConfigError)


# ---- SGLang ----


@contextmanager
def servers(saved: Tensors, **info: int) -> Iterator[tuple[list[str], SGLangServer | None]]:
    """A server in the process of rank 1, and one in that of rank 2: their urls, and this rank's own."""
    own = SGLangServer(saved, **info) if dist.get_rank() in (1, 2) else None
    urls = [url for url in all_ranks(own and own.url) if url]
    try:
        yield urls, own
    finally:
        dist.barrier()
        if own is not None:
            own.stop()


def to_sglang(folders: dict[str, Path], tmp: Path) -> None:
    for kind, model, weights in models(folders, tmp):
        saved = saved_as(model, weights, tmp / f"sglang {kind}")
        largest = max(t.num_bytes for t in weights.tensors.values())
        with servers(saved) as (urls, own):
            client = SGLangServers(
                weights, urls if kind == "llama" else urls[0], bucket_bytes=3 * largest, timeout_s=60
            )
            for version in ("1", "2"):
                if own is not None:
                    own.tensors.clear()
                client.update(weight_version=version)
                dist.barrier()
                if own is not None and own.url in client._urls:
                    equal(own.tensors, saved, kind)
                    assert own.version == version and not own.is_open and not own.is_paused
            client.close()
            dist.barrier()
            assert own is None or (own.groups == {} and own.asked.count("init_weights_update_group") < 2)


def tensors_of_several_widths(folders: dict[str, Path], tmp: Path) -> None:
    """In a bucket, each begins where its dtype may begin."""
    model = plain_model("llama", folders["llama"], dtype=torch.bfloat16)
    model.model.norm.float()
    model.lm_head.float()
    weights = live_weights(model)
    saved = {name: tensor.detach() for name, tensor in full_state(model).items()}
    with servers(saved) as (urls, own):
        SGLangServers(weights, urls[0], timeout_s=60).update()
        dist.barrier()
        if dist.get_rank() == 1 and own is not None:
            equal(own.tensors, saved, "two dtypes")


def what_goes_wrong_at_sglang(folders: dict[str, Path], tmp: Path) -> None:
    rank = dist.get_rank()
    model = sharded_meta_model("llama", folders["llama"])
    load_weights(model, folders["llama"], progress=False)
    weights, saved = live_weights(model), stored_tensors(folders["llama"])
    small = 3 * max(t.num_bytes for t in weights.tensors.values())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{free.getsockname()[1]}"
        said = refusal(SGLangServers(weights, all_ranks(away)[0], timeout_s=5).update, ConfigError)
    assert all_ranks(away)[0] in said and "does not answer" in said and "update again" in said
    for info in ({"pp_size": 2}, {"dp_size": 4}):
        with servers(saved, **info) as (urls, _):
            said = refusal(SGLangServers(weights, urls[0], timeout_s=5).update, ConfigError)
            assert "tp_size alone" in said and urls[0] in said
    with servers(saved) as (urls, own), socket.socket() as taken:
        if own is not None:
            del own.info["tp_size"]
        dist.barrier()
        assert "no server of SGLang" in refusal(SGLangServers(weights, urls[0], timeout_s=5).update, ConfigError)
        if own is not None:
            own.info["tp_size"] = 1
        taken.bind(("", 0))
        taken.listen()
        dist.barrier()
        client = SGLangServers(weights, urls[0], timeout_s=5, port=taken.getsockname()[1])
        assert "out of reach" in refusal(client.update, ConfigError)
    others = {name.replace("self_attn", "attention"): tensor for name, tensor in saved.items()}
    with servers(others) as (urls, _):
        said = refusal(SGLangServers(weights, urls[0], timeout_s=20).update, ConfigError)
        assert "answers 400" in said and "self_attn" in said and "same model" in said
    for fault, words in (("500", "answers 500"), ("dies", "does not answer"), ("silent", "within timeout_s=4")):
        with servers(saved) as (urls, own):
            client = SGLangServers(weights, urls[0], bucket_bytes=small, timeout_s=4)
            if own is not None:
                own.fault = fault
            dist.barrier()
            begin_s = monotonic()
            said = refusal(client.update, ConfigError)
            assert words in said and urls[0] in said and monotonic() - begin_s < 30, said
            if fault != "silent":
                if own is not None:
                    assert own.is_paused or own.url != urls[0], "it does not generate with half of the weights"
                    own.fault = ""
                dist.barrier()
                client.update(weight_version="again")
                dist.barrier()
                if rank == 1 and own is not None:
                    equal(own.tensors, saved, fault)
                    assert not own.is_paused and not own.is_open
    equal(full_state(model), full_state(plain_model("llama", folders["llama"])), "training goes on")
    assert "give one url" in refusal(lambda: SGLangServers(weights, [], timeout_s=4), ConfigError)


def adapters_alone(folders: dict[str, Path], tmp: Path) -> None:
    model = adapted(folders["mixtral"])
    weights = live_weights(model)
    for what in (weight_source, shard_specs):
        assert "merge_adapters=True" in refusal(lambda what=what: what(weights), ConfigError)
    assert "merge_adapters=True" in refusal(lambda: delta_entries(weights, weights.changes()), ConfigError)
    save_pretrained(model, tmp / "adapter")
    with servers({}) as (urls, own):
        client = SGLangServers(weights, urls, timeout_s=20)
        assert "merge_adapters=True" in refusal(client.update, ConfigError)
        for _ in range(2):
            client.load_adapter(tmp / "adapter", "policy")
        assert own is None or own.adapters == {"policy": str(tmp / "adapter")}


# ---- verl ----


def to_verl(folders: dict[str, Path], tmp: Path) -> None:
    """All ranks give the same entries in the same order; the blocks of those that contribute make up each tensor."""
    for kind, model, weights in models(folders, tmp):
        saved = saved_as(model, weights, tmp / f"verl {kind}")
        for dtype in {t.dtype for t in saved.values()}:
            assert dtype == next(iter(saved.values())).dtype
        entries = [
            (name, local, spec.full_shape, spec.contributes, spec.place) for name, local, spec in shard_specs(weights)
        ]
        every = all_ranks(entries)
        assert all([each[0] for each in some] == list(weights.tensors) for some in every), kind
        found = {name: torch.full_like(tensor, torch.nan) for name, tensor in saved.items()}
        given = dict.fromkeys(saved, 0)
        for name, local, shape, contributes, place in (each for some in every for each in some):
            assert local.dim() == 1 and local.dtype == saved[name].dtype and shape == tuple(saved[name].shape)
            assert contributes or (local.numel() == 0 and place == 0)
            if contributes:
                box = tuple(slice(a, a + n) for a, n in zip(place.global_offset, place.local_shape, strict=True))
                found[name][box] = local.reshape(place.local_shape)
                given[name] += local.numel()
        equal(found, saved, kind)
        assert given == {name: tensor.numel() for name, tensor in saved.items()}, (kind, "each element once")

    model = from_pretrained(folders["mixtral"], **MOE, **QUIET)
    weights = live_weights(model, dtype=torch.bfloat16)
    copy = {name: tensor.clone() for bucket in weights.buckets(to=None) for name, tensor in bucket.items()}
    changes = weights.changes()
    step(model)
    entries = list(delta_entries(weights, changes))
    assert all(each[-1] is dist.group.WORLD for each in entries)
    every = all_ranks([each[:-1] for each in entries])
    assert all([slots for slots, *_ in some] == [slots for slots, *_ in every[0]] for some in every)
    for ((name, shape),), dtype, counts, indices, values in (each for some in every for each in some):
        assert (indices.dtype, getattr(torch, dtype)) == (torch.int32, values.dtype) and values.dtype == torch.bfloat16
        assert counts.tolist() == [len(indices)] == [len(values)] and shape == tuple(copy[name].shape)
        copy[name].view(-1)[indices.long()] = values
    equal(copy, saved_as(model, weights, tmp / "delta"), "delta")


# ---- docs/weights.md ----


def the_page(folders: dict[str, Path], tmp: Path) -> None:
    """Every block runs as it stands, but for the names of machines, and does what its section says."""
    text = DOCUMENT.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    live, whole, sparse, sglang, folder, verl = blocks
    rank, model = dist.get_rank(), from_pretrained(folders["mixtral"], **MOE, **QUIET)
    taken: Tensors = {}
    given = {"model": model, "rank": rank, "train_a_step": step, "take": taken.update, "folder": tmp / "policy"}
    names: dict[str, Any] = given | {"seen": {}, "changed": {}}
    exec(live, names)
    weights = names["weights"]
    assert names["seen"] == ({n: t.shape for n, t in weights.tensors.items()} if rank == 0 else {})
    assert list(taken) == list(names["seen"]) and sum(names["changed"].values()) > 0

    exec(whole, names := dict(given))
    saved = saved_as(model, weights, tmp / "page 1")
    equal(names["engine"].server.tensors, saved if rank == 0 else {}, "vLLM")
    server = names["engine"].server

    def first_the_server(model: Any) -> None:
        names["engine"].server.tensors = server.tensors  # it has what the trainer begins with
        step(model)

    exec(sparse, names := given | {"train_a_step": first_the_server})
    saved = saved_as(model, weights, tmp / "page 2")
    equal(server.tensors, saved if rank == 0 else {}, "patches")

    with servers(saved) as (urls, own):
        exec(sglang.replace("http://node7:30000", urls[0]).replace("http://node8:30000", urls[1]), dict(given))
        saved = saved_as(model, weights, tmp / "page 3")
        if own is not None:
            equal(own.tensors, saved, "SGLang")
            assert own.version == "1" and own.groups == {}
        exec(folder.replace("http://node7:30000", urls[0]), given | {"adapted": adapted(folders["mixtral"])})
        dist.barrier()
        assert rank != 1 or own is None or own.adapters == {"policy": str(tmp / "policy")}

    exec(verl, names := dict(given))
    engine = names["StreamingEngine"](model)
    engine.initialize()
    found = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    equal(found, saved, "verl")
    assert [name for name, _, _ in engine.get_per_tensor_param_shard()[0]] == list(weights.tensors)
    engine.prime_delta_snapshots()
    step(model)
    for some in all_ranks([entry[:-1] for entry in engine.get_per_tensor_param_delta_shard()[0]]):
        for ((name, _),), _, _, indices, values in some:
            found[name].view(-1)[indices.long()] = values
    equal(found, saved_as(model, weights, tmp / "page 4"), "verl")


# ---- all of it ----

CASES = [
    to_vllm, patches_for_vllm, what_goes_wrong_at_vllm, to_sglang, tensors_of_several_widths, what_goes_wrong_at_sglang,
    adapters_alone, to_verl, the_page,
]  # fmt: skip


def consume(cases: list[Any], real: bool, folders: dict[str, Path], tmp: Path) -> None:
    with nullcontext() if real else stand_ins():
        run_cases(cases, folders, tmp)


def test_consumers_get_the_checkpoint(folders, tmp_path):
    run_ranks(consume, 4, CASES, False, folders, tmp_path)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_own_classes_take_it(folders, tmp_path):
    run_ranks(consume, 4, [to_vllm, patches_for_vllm], True, folders, tmp_path)


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")
def test_verls_own_classes_take_it(folders, tmp_path):
    run_ranks(consume, 4, [to_verl], True, folders, tmp_path)
