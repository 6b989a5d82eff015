"""Which blocks compute their activations again, what they keep and where: values are a plain run's, to the bit."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from hf_fsdp_tools import ConfigError, HybridFSDPPlugin, ParallelDims, add_adapter, from_pretrained
from hf_fsdp_tools.sharding import recompute
from hf_fsdp_tools.sharding.describe import describe_sharding
from tests._dist import run_cases, run_ranks
from tests._training import (
    ShardedTrainer,
    apart,
    arguments,
    full_parameters,
    logged,
    make_rows,
    new_accelerator,
    train,
)

LAYERS, WIDTH, ROWS, STEPS = 5, 32, 2, 3

WAYS: dict[str, Any] = {
    "all": True,
    "every second": {"every_n_layers": 2},
    "offloaded": {"offload": True},
    "every third, offloaded": {"every_n_layers": 3, "offload": True},
    "products kept": {"save_ops": ["matmul", "attention"]},
    "products kept, offloaded": {"save_ops": "aten::mm", "offload": True},
}
COMPILED = ["every second", "every third, offloaded", "products kept"]
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": "bf16"},
    "LoRA": {"peft_config": {"r": 4, "target_modules": ["q_proj", "up_proj"]}},
    "compiled": {"compile": "aot_eager"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of five layers."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=97, tie_word_embeddings=False)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("recompute") / "llama"
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def rows_of_rank(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(3, 90, (ROWS, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def runs_of_blocks(model: nn.Module) -> Counter[int]:
    """Grows whenever a block's attention runs."""
    runs: Counter[int] = Counter()
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    for index, attention in enumerate(layers):
        attention.register_forward_pre_hook(lambda *_, index=index: runs.update([index]))
    return runs


def trained(folder: Path, way: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if "mesh" in options:
        options["mesh"] = options["mesh"].build_mesh("cpu")
    model = from_pretrained(folder, activation_checkpointing=way, load_kwargs={"progress": False}, **options).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(**rows_of_rank(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full_parameters(model)


def same_as_plain(options: dict[str, Any], ways: list[str], folder: Path) -> None:
    losses, weights = trained(folder, False, **options)
    for way in ways:
        found = trained(folder, WAYS[way], **options)
        assert found[0] == losses and apart(found[1], weights) == 0, way


def counted(folder: Path) -> dict[str, Any]:
    """Of each way: how often each block ran, bytes on the host at once and in all, and products that were computed."""
    found: dict[str, Any] = {}

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
            return func(*args, **(kwargs or {}))

    class Counted(recompute._PlainLink):
        def keep(self, source: torch.Tensor) -> Any:
            host, mark = super().keep(source)
            kept.append(host.nbytes)
            return host, mark

    for name, way in {"plain": False, **WAYS}.items():
        kept: list[int] = []
        with pytest.MonkeyPatch.context() as patch, Products() as products:
            patch.setattr(recompute, "_PlainLink", Counted)
            model = from_pretrained(folder, activation_checkpointing=way, load_kwargs={"progress": False}).train()
            runs = runs_of_blocks(model)
            products.count = 0
            model(**rows_of_rank(0)).loss.backward()
        found[name] = dict(runs), kept, products.count
        if name == "every third, offloaded":
            assert (
                "recomputed block by block (every 3rd block of each stack), the blocks' inputs on the host"
                in describe_sharding(model)
            )
    return found


def an_evaluation_keeps_nothing(folder: Path) -> None:
    way = {"offload": True}
    model = from_pretrained(folder, activation_checkpointing=way, load_kwargs={"progress": False}).train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "_Kept", None)
        with torch.no_grad():
            model(**rows_of_rank(0))
        model.eval()
        model(**rows_of_rank(0))


def a_host_without_memory_is_refused(folder: Path) -> str:
    """On both ranks, where one of them alone sees too little; before a block has run."""
    way = {"offload": True}
    with pytest.MonkeyPatch.context() as patch:
        model = from_pretrained(folder, activation_checkpointing=way, load_kwargs={"progress": False})
        needed = 2 * LAYERS * ROWS * 16 * WIDTH * 4
        patch.setattr(recompute, "available_bytes", lambda: needed if dist.get_rank() else 10 * needed)
        runs = runs_of_blocks(model)
        with torch.no_grad():
            model(**rows_of_rank(0))
        runs.clear()
        with pytest.raises(ConfigError) as caught:
            model.train()(**rows_of_rank(0))
        assert not runs
    return str(caught.value)


def adapters_added_later(folder: Path) -> None:
    """What blocks keep stays as it was, and where it is checked, when the model is sharded again."""
    from peft import LoraConfig

    way = {"offload": True, "every_n_layers": 2}
    model = from_pretrained(folder, activation_checkpointing=way, load_kwargs={"progress": False})
    model = add_adapter(model, LoraConfig(r=2, target_modules=["q_proj"])).train()
    runs = runs_of_blocks(model)
    model(**rows_of_rank(0)).loss.backward()
    assert runs == {index: 1 + (index % 2 == 0) for index in range(LAYERS)}


def refused(folder: Path) -> None:
    for way, said in (({"every_n_layers": "2"}, "whole number"), ({"save_ops": ["mmm"]}, "no operator 'mmm'")):
        with pytest.raises(ConfigError, match=said):
            from_pretrained(folder, activation_checkpointing=way)
    way = {"offload": bool(dist.get_rank())}
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        from_pretrained(folder, activation_checkpointing=way)


def in_both_hosts(mixed: str, out: Path, folder: Path) -> dict[str, Any]:
    """Losses and weights: a loop with a plugin, and a Trainer of `fsdp_config`, plain and with all three settings."""
    prefix = "activation_checkpointing"
    more = {prefix: True, f"{prefix}_offload": True, f"{prefix}_every_n_layers": 2, f"{prefix}_save_ops": "matmul"}
    found: dict[str, Any] = {}
    for name, settings in {"plain": {}, "settings": more}.items():
        accelerator = new_accelerator(mixed_precision=mixed, fsdp_plugin=HybridFSDPPlugin(**settings))
        model = from_pretrained(folder, accelerator=accelerator).train()
        runs = runs_of_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(make_rows(2 * STEPS * ROWS), batch_size=ROWS)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found[f"loop, {name}"] = train(model, optimizer, loader, accelerator=accelerator), full_parameters(model)
        found[f"loop, {name}, runs"] = dict(runs)
        args = arguments(
            out / name, max_steps=STEPS, bf16=mixed == "bf16", fsdp=True, fsdp_config={"version": 2, **settings}
        )
        model = hf.AutoModelForCausalLM.from_pretrained(folder)
        runs = runs_of_blocks(model)
        trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(2 * STEPS * ROWS))
        trainer.train()
        found[f"Trainer, {name}"] = logged(trainer), full_parameters(trainer.model)
        found[f"Trainer, {name}, runs"] = dict(runs)
    return found


@pytest.fixture(scope="module")
def found(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, what each case returns."""
    out = tmp_path_factory.mktemp("out")
    cases: dict[str, Any] = {
        f"same, {name}": partial(same_as_plain, options, COMPILED if name == "compiled" else list(WAYS))
        for name, options in OPTIONS.items()
    }
    alone = (counted, an_evaluation_keeps_nothing, a_host_without_memory_is_refused, adapters_added_later, refused)
    cases |= {case.__name__: case for case in alone}
    cases |= {f"hosts, {mixed}": partial(in_both_hosts, mixed, out) for mixed in ("no", "bf16")}
    return run_ranks(run_cases, 2, cases, llama)


@pytest.mark.shows("offloaded or chosen checkpointing", "FSDP2", "LoRA", "compile")
def test_values_are_those_of_a_plain_run_and_bad_settings_are_refused(found):
    """Each case asserts on its rank."""
    assert all(f"same, {name}" in rank for rank in found for name in OPTIONS)


@pytest.mark.shows("offloaded or chosen checkpointing", "HSDP")
def test_values_are_those_of_a_plain_run_in_copies_of_the_model(llama):
    mesh = {"mesh": ParallelDims(dp_replicate_size=2)}
    run_ranks(same_as_plain, 4, mesh, ["offloaded", "every second"], llama)


def test_blocks_run_again_and_bytes_on_the_host_are_counted(found):
    of_block = ROWS * 16 * WIDTH * 4
    products = 4 + 3  # of a block: queries, keys, values and output; gate, up and down
    for rank in found:
        ways = rank["counted"]
        plain = ways["plain"][2]
        for name, kept, step in (
            ("plain", 0, LAYERS),
            ("all", 0, 1),
            ("every second", 0, 2),
            ("offloaded", 5, 1),
            ("every third, offloaded", 2, 3),
            ("products kept", 0, 1),
            ("products kept, offloaded", 5, 1),
        ):
            runs, sizes, count = ways[name]
            again = 0 if name == "plain" else len(range(0, LAYERS, step))
            assert runs == {index: 1 + (name != "plain" and index % step == 0) for index in range(LAYERS)}, name
            assert sizes == [of_block] * kept, name
            # the last product of a block is not needed again: torch stops before it
            expected = 0 if "kept" in name else again * (products - 1)
            assert count - plain == expected, name


def test_a_host_without_memory_is_one_error_on_every_rank(found):
    texts = {rank["a_host_without_memory_is_refused"] for rank in found}
    assert len(texts) == 1
    (text,) = texts
    assert "41.0 kB of host memory for the 2 ranks on" in text and "where 41.0 kB are available. Take a smaller" in text


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_both_hosts_train_as_without(found, mixed):
    for rank in found:
        cases = rank[f"hosts, {mixed}"]
        for host in ("loop", "Trainer"):
            (losses, weights), (own, own_weights) = (cases[f"{host}, {name}"] for name in ("plain", "settings"))
            assert own == losses and apart(own_weights, weights) == 0, host
            runs = {index: STEPS * (1 + (index % 2 == 0)) for index in range(LAYERS)}
            assert cases[f"{host}, settings, runs"] == runs, host
            assert cases[f"{host}, plain, runs"] == dict.fromkeys(range(LAYERS), STEPS), host
