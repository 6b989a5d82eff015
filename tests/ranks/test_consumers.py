"""Weights for vLLM, and by the examples for SGLang and verl: what arrives is the checkpoint, and what goes wrong is one
error on all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from tests.ranks.test_live_weights import MOE, QUIET, filled, replicas

Tensors = dict[str, torch.Tensor]
DOCS = Path(__file__).parents[2] / "docs"


def step(model: Any) -> None:
    tokens = torch.arange(24).reshape(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.zero_grad()


def made(name: str, folders: dict[str, Path]) -> tuple[Any, LiveWeights]:
    if name == "lora":
        model = adapted(folders["mixtral"])
        return model, live_weights(model, dtype=torch.bfloat16, merge_adapters=True)
    kind, sharding = ("llama", {"mesh": replicas()}) if name == "replicas" else (name, {})
    model = loaded(kind, folders[kind], **sharding)
    return model, live_weights(model)


def adapted(folder: Path) -> Any:
    lora = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=["experts.down_proj"], task_type="CAUSAL_LM")
    return filled(from_pretrained(folder, peft_config=lora, **MOE, **QUIET), 0.01)


def saved_as(model: Any, weights: LiveWeights, folder: Path) -> Tensors:
    """What `save_pretrained` writes at this moment. Every rank must call."""
    dtype = next(iter(weights.tensors.values())).dtype
    save_pretrained(model, folder, dtype=dtype, merge_adapters=hasattr(model, "peft_config"))
    return stored_tensors(folder)


# ---- vLLM ----


def to_vllm(kinds: tuple[str, ...], folders: dict[str, Path], tmp: Path) -> None:
    rank = dist.get_rank()
    for kind in kinds:
        model, weights = made(kind, folders)
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
        assert_same_tensors(server.tensors, saved if rank == 0 else {}, kind)

        everywhere = weight_source(weights, to=None, bucket_bytes=4 * largest)
        assert all(tuple(m.owners) == tuple(range(dist.get_world_size())) for m in everywhere.metadata)
        whole, local = list(everywhere.iter_full()), list(everywhere.iter_local())
        names = everywhere.owned_names(rank)
        assert names == [name for name, _ in whole] == [name for name, _ in local] == list(weights.tensors)
        assert_same_tensors(dict(whole), saved, kind)
        assert_same_tensors(dict(local), saved, kind)
        if kind == "llama":  # each call is a fresh pass, of the values of its moment
            step(model)
            update_vllm(Engine(source, rank, server))
            saved = saved_as(model, weights, tmp / "later")
            assert_same_tensors(server.tensors, saved if rank == 0 else {}, kind)


def what_goes_wrong_at_vllm(folders: dict[str, Path], tmp: Path) -> None:
    rank = dist.get_rank()
    _, weights = made("llama", folders)
    source = weight_source(weights, bucket_bytes=3 * max(t.num_bytes for t in weights.tensors.values()))
    with pytest.raises(ConfigError if rank == 0 else RanksError, match="500 Server Error") as caught:
        update_vllm(Engine(source, rank, VLLMServer(fails_at=2)))
    del caught
    server = VLLMServer()
    update_vllm(Engine(source, rank, server))
    assert_same_tensors(server.tensors, stored_tensors(folders["llama"]) if rank == 0 else {}, "the next pass is whole")
    for to in ((), (0, 3)):
        assert "ranks 0 to 2" in refusal(lambda to=to: weight_source(weights, to=to), ConfigError)


def adapters_alone(folders: dict[str, Path], tmp: Path) -> None:
    weights = live_weights(adapted(folders["mixtral"]))
    assert "merge_adapters=True" in refusal(lambda: weight_source(weights), ConfigError)


# ---- the examples ----


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
    _, weights = made("llama", folders)
    saved = stored_tensors(folders["llama"])
    with servers(saved) as (urls, own):
        client = example("sglang")["SGLangServers"](weights, urls, backend="gloo", timeout_s=60)
        for version in ("1", "2"):
            if own is not None:
                own.tensors.clear()
            client.update(version)
            dist.barrier()
            if own is not None:
                assert_same_tensors(own.tensors, saved, "SGLang")
                assert own.version == version and not own.is_open and not own.is_paused
        assert own is None or own.asked.count("init_weights_update_group") == 1


def tensors_of_several_widths(folders: dict[str, Path], tmp: Path) -> None:
    """In a bucket, each begins where its dtype may begin."""
    model = plain_model("llama", folders["llama"], dtype=torch.bfloat16)
    model.model.norm.float()
    model.lm_head.float()
    saved = {name: tensor.detach() for name, tensor in full_state(model).items()}
    with servers(saved) as (urls, own):
        example("sglang")["SGLangServers"](live_weights(model), urls, backend="gloo", timeout_s=60).update("1")
        dist.barrier()
        if own is not None:
            assert_same_tensors(own.tensors, saved, "two dtypes")


def to_verl(folders: dict[str, Path], tmp: Path) -> None:
    engine = example("verl")["StreamingEngine"](adapted(folders["mixtral"]))
    engine.initialize()
    found = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    assert_same_tensors(found, saved_as(engine.module, engine.weights, tmp / "verl"), "verl")


# ---- docs/weights.md ----


def the_page(folders: dict[str, Path], tmp: Path) -> None:
    """Every block runs as it stands, but for the names of machines, and does what its section says."""
    live, whole = (block.text for block in blocks("docs/weights.md", "python"))
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


# ---- all of it ----

KINDS = ("llama",)
OTHERS = ("tied", "qwen3_moe", "replicas", "lora")
CASES = (what_goes_wrong_at_vllm, adapters_alone, to_sglang, tensors_of_several_widths, to_verl, the_page)
NAMED = named(*CASES)


def consume(kinds: tuple[str, ...], cases: dict[str, Any], real: bool, folders: dict[str, Path], tmp: Path) -> None:
    with nullcontext() if real else stand_ins():
        run_cases({"to vllm": partial(to_vllm, kinds), **cases}, folders, tmp)


@pytest.mark.parametrize(
    ("ranks", "kinds", "cases"),
    [(3, KINDS, NAMED), pytest.param(4, OTHERS, {}, marks=pytest.mark.nightly)],
    ids=["usual", "others"],
)
def test_consumers_get_the_checkpoint(folders, tmp_path, ranks, kinds, cases):
    run_ranks(consume, ranks, kinds, cases, False, folders, tmp_path)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_own_classes_take_it(folders, tmp_path):
    run_ranks(consume, 4, KINDS + OTHERS, {}, True, folders, tmp_path)


def test_the_examples_are_short():
    for file in (DOCS / "examples").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 120, file.name
