"""FP8 by torchao: numerics of one process, bytes that are gathered, states as without it, and what is refused.

Products are emulated on CPUs, in fp32 of the same FP8 values that a GPU multiplies.
"""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from accelerate.utils import AORecipeKwargs, TERecipeKwargs
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp2
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import (
    ConfigError,
    Float8Policy,
    FSDPPlugin,
    ParallelDims,
    ParameterEMA,
    WrapPolicy,
    describe_sharding,
    from_pretrained,
    make_accelerator,
    save_pretrained,
    unsharded,
)
from hf_fsdp_tools.extensions import float8
from hf_fsdp_tools.extensions.float8 import float8_config
from hf_fsdp_tools.steps import build_meta_model, make_wrap_plan, parallelize_model, shard_model
from tests._checkpoints import assert_same_tensors, full_state, make_model, refusal, stored_tensors
from tests._dist import run_cases, run_ranks
from tests._noted import calls_of
from tests._training import (
    ShardedTrainer,
    arguments,
    full_gradients,
    logged,
    make_rows,
    new_accelerator,
)
from tests.api import Float8Layer, ModuleTree, float8_layers

SIZES = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def is_float8(module: torch.nn.Module) -> bool:
    return Float8Layer.of(module).config is not None


PER_BLOCK = 7
FP32 = Float8Policy(param_dtype=None)
IDS = torch.randint(3, 131, (12, 9), generator=torch.Generator().manual_seed(3))
QUIET = {"progress": False}

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated")


def llama(**sizes: int) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, **sizes}, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("float8") / "checkpoint"
    llama().save_pretrained(path)
    return path


def load(folder: Path, mp_policy: Any = FP32, **options: Any) -> Any:
    return from_pretrained(folder, mp_policy=mp_policy, load_kwargs=QUIET, **options).train()


def by_torchao(model: Any = None, recipe: str = "tensorwise") -> Any:
    """The model in one process, converted by torchao itself and nothing of this package."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, pad_inner_dim=True)
    is_converted = lambda _, name: "layers" in name and not name.endswith("gate")  # noqa: E731
    return convert_to_float8_training((model or llama()).train(), config=config, module_filter_fn=is_converted)


def steps(model: Any, rows: Any, optimizer: Any = None, *, scale: float = 1.0) -> list[float]:
    """One step for each list of micro-batches, of AdamW if no other is given; all losses."""
    losses = []
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for micro in rows:
        for ids in micro:
            loss = model(input_ids=ids, labels=ids).loss
            (loss * scale).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def rows_of(rank: int, size: int) -> list[list[torch.Tensor]]:
    """Three steps of one micro-batch of two rows for each rank."""
    return [[IDS[(2 * (size * step + rank)) % 12 :][:2]] for step in range(3)]


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Bytes of each all-gather of FSDP2 that this rank gets, and elements of each all-reduce beside it."""
    gathers = calls_of(fsdp2, "foreach_all_gather", lambda result, *_: result.all_gather_output.nbytes)
    reductions = calls_of(dist, "all_reduce", lambda _, tensor, *__: tensor.numel())
    with gathers as gathered, reductions as reduced:
        yield {"gathers": gathered, "all-reduces": reduced}


def numerics_are_those_of_one_process(folder: Path, tmp: Path) -> None:
    """Three steps of AdamW, bit for bit: the sum of two gradients does not depend on their order; and plain files."""
    rank, model = dist.get_rank(), load(folder)
    losses = steps(model, rows_of(rank, 2))
    one = by_torchao()
    together = [[*rows_of(0, 2)[step], *rows_of(1, 2)[step]] for step in range(3)]
    assert losses == steps(one, together, scale=1 / 2)[rank::2]
    for parameter in model.parameters():
        assert type(parameter.data) is DTensor and type(parameter.to_local()) is torch.Tensor
    save_pretrained(model, tmp / "saved")
    assert_same_tensors(
        stored_tensors(tmp / "saved"), {name: tensor.detach() for name, tensor in one.state_dict().items()}
    )


def half_the_bytes_of_bf16_are_gathered(folder: Path, tmp: Path) -> None:
    def one_step(policy: Any) -> tuple[dict[str, list[int]], Any]:
        model = load(folder, policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        steps(model, rows_of(dist.get_rank(), 2)[:1], optimizer)  # torch makes its records in the first
        with counted() as seen:
            steps(model, rows_of(dist.get_rank(), 2)[1:], optimizer)
        return seen, model

    in_bf16, _ = one_step("bf16")
    seen, model = one_step("fp8")
    assert "computation  bfloat16, FP8 in 14 linear layers" in describe_sharding(model)
    converted = [module.weight for module in model.modules() if is_float8(module)]
    assert len(converted) == PER_BLOCK * SIZES["num_hidden_layers"]
    values = sum(weight.numel() for weight in converted) // SIZES["num_hidden_layers"]
    norms = 2 * 2 * SIZES["hidden_size"]
    pairs = zip(in_bf16["gathers"], seen["gathers"], strict=True)
    # each of two steps: two blocks forward and back again; embedding, head and norm of the root are in bf16
    blocks = [(2 * values + norms, values + norms)] * (2 * 2 * SIZES["num_hidden_layers"])
    assert [(before, after) for before, after in pairs if before != after] == blocks
    assert seen["all-reduces"] == [len(converted)] * 2  # the scales of all weights, once in each step
    assert not in_bf16["all-reduces"]


def evaluation_generation_and_averages(folder: Path, tmp: Path) -> None:
    """Units are gathered for the first time in inference mode, and by other ways than a forward pass of the model."""
    rank = dist.get_rank()
    model, reference = load(folder), by_torchao()
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, reference)]
    together = [[rows_of(0, 2)[0][0], rows_of(1, 2)[0][0]]]
    with torch.inference_mode():
        assert torch.equal(model(IDS[:2]).logits, reference(IDS[:2]).logits)
    average = ParameterEMA(model, decay=0.5)
    for _ in range(2):
        steps(model, [[together[0][rank]]], optimizers[0])
        steps(reference, together, optimizers[1], scale=0.5)
        average.step()
    with torch.no_grad():  # the head's inputs alone: TRL's losses in pieces do not call the model
        reference.eval(), model.eval()
        assert torch.equal(model.model(IDS[:2]).last_hidden_state, reference.model(IDS[:2]).last_hidden_state)
        with unsharded(model):
            assert torch.equal(model(IDS[:2]).logits, reference(IDS[:2]).logits)
        with average.applied():
            changed = model(IDS[:2]).logits
            reference.load_state_dict(full_state(model))
            assert torch.equal(changed, reference(IDS[:2]).logits)
        weight = model.model.layers[0].mlp.up_proj.weight
        for factor in (100, 0.1):  # by a user's code, in place: nothing counts it
            weight.data.mul_(factor)
            reference.load_state_dict(full_state(model))
            assert torch.equal(model(IDS[:2]).logits, reference(IDS[:2]).logits)


def a_trainer_is_told_by_the_launcher(folder: Path, tmp: Path) -> None:
    """bf16=True, which TRL sets, means FP8 where the launcher says so."""
    rows = make_rows(8)
    with patch.dict("os.environ", {"ACCELERATE_MIXED_PRECISION": "fp8"}):
        args = arguments(tmp / "trainer", max_steps=2, per_device_train_batch_size=2, bf16=True)
        accelerator = make_accelerator(args)
        assert accelerator.mixed_precision == "fp8"
        model = from_pretrained(folder, accelerator=accelerator, load_kwargs=QUIET)
        trainer = ShardedTrainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        assert sum(map(is_float8, model.modules())) == PER_BLOCK * SIZES["num_hidden_layers"]
        plain = ShardedTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), args=args, train_dataset=rows
        )
        plain.train()
        assert logged(plain) == logged(trainer)


def words_of_accelerate(folder: Path, tmp: Path) -> None:
    from torchao.float8 import Float8LinearConfig

    recipe = AORecipeKwargs(
        config=Float8LinearConfig.from_recipe_name("rowwise"), module_filter_func=lambda module, name: "mlp" in name
    )
    accelerator = new_accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model = from_pretrained(folder, accelerator=accelerator, load_kwargs=QUIET).train()
    layers = {name: module for name, module in model.named_modules() if is_float8(module)}
    assert len(layers) == 3 * SIZES["num_hidden_layers"] and all("mlp" in name for name in layers)
    steps(model, rows_of(dist.get_rank(), 2)[:1])
    variables = {"ACCELERATE_FP8_BACKEND": "ao", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "False"}
    with patch.dict("os.environ", {"ACCELERATE_MIXED_PRECISION": "fp8", **variables}):
        model = from_pretrained(folder, accelerator=new_accelerator(), load_kwargs=QUIET).train()
        with counted() as seen:
            steps(model, rows_of(dist.get_rank(), 2)[:1])
        assert not seen["all-reduces"]  # gathered in bf16
        assert sum(map(is_float8, model.modules())) == PER_BLOCK * SIZES["num_hidden_layers"]


def assert_same_pass(model: Any, reference: Any) -> None:
    """Gradients and evaluation of one process, but for the order of sums."""
    rows = IDS[:2]
    for each in (model, reference):
        each(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    gradients = full_gradients(model)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=2e-6, msg=name)
    with torch.no_grad():
        expected = reference(input_ids=rows).logits  # torchao fails in inference mode with scales per row
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=rows, use_cache=False).logits, expected, rtol=1e-4, atol=2e-6)


def layers_shared_by_ranks(recipe: str, options: dict[str, Any], folder: Path) -> None:
    """Scales are those of whole tensors, which each rank has a part of: weights, inputs, gradients."""
    model = load(folder, replace(FP32, config=recipe), mesh=ParallelDims(tp_size=2), **options)
    assert sum(map(is_float8, model.modules())) == PER_BLOCK * SIZES["num_hidden_layers"]
    reference = by_torchao(llama(vocab_size=132), recipe)
    assert_same_pass(model, reference)
    reference.zero_grad()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    reference.load_state_dict(full_state(model))
    model.zero_grad()
    assert_same_pass(model, reference)


def refusals(folder: Path, tmp: Path) -> None:
    mesh = ParallelDims(tp_size=2)
    if dist.get_rank() == 0:
        llama(vocab_size=132, hidden_size=32).save_pretrained(tmp / "narrow")
    dist.barrier()
    narrow = Float8Policy(module_filter=lambda module, name: name.endswith("k_proj"))
    for source, policy, options, said in (
        (folder, Float8Policy(), {"policy": WrapPolicy(reshard_after_forward={"*": 2})}, "reshard_after_forward 2"),
        (folder, Float8Policy(module_filter=lambda module, name: False), {}, "no plain linear layer"),
        (folder, Float8Policy(config="rowise"), {}, "rowwise"),
        (tmp / "narrow", narrow, {"mesh": mesh}, "have a dimension that is not divisible by 16"),
    ):
        assert said in refusal(partial(load, source, policy, **options), ConfigError)
    rules = {f"model.layers.*.mlp.{name}_proj": "packed_colwise" for name in ("up", "gate")}
    model = parallelize_model(build_meta_model(tmp / "narrow"), mesh.build_mesh("cpu"), tp_plan=rules)
    plan = make_wrap_plan(model)
    said = refusal(lambda: shard_model(model, plan, mesh=mesh.build_mesh("cpu"), mp_policy=FP32), ConfigError)
    assert "cannot agree on scales" in said and "Float8Policy(module_filter" in said and "\n" not in said
    accelerator, in_bf16 = new_accelerator(mixed_precision="fp8"), load(folder, "bf16")
    assert "Accelerator computes in fp8" in refusal(lambda: accelerator.prepare(in_bf16), ConfigError)
    for precision, handlers, plugin, said in (
        ("fp8", [object.__new__(TERecipeKwargs)], None, "AORecipeKwargs"),
        ("bf16", [AORecipeKwargs()], None, "mixed_precision='fp8'"),
        ("fp8", None, FSDPPlugin(fsdp_version=1), "needs FSDP2"),
        ("fp8", None, FSDPPlugin(mixed_precision_policy="bf16"), "policy of its own"),
    ):
        with pytest.raises(ConfigError, match=said):
            new_accelerator(mixed_precision=precision, kwargs_handlers=handlers, fsdp_plugin=plugin)
    launched = {"ACCELERATE_MIXED_PRECISION": "fp8"}
    other = patch.dict("os.environ", launched | {"ACCELERATE_FP8_BACKEND": "te"})
    with other, pytest.raises(ConfigError, match="backend is te"):
        new_accelerator()
    with patch.dict("os.environ", launched):
        args = arguments(tmp)
        args.mixed_precision = "fp16"  # GPUs alone have it
        with pytest.raises(ConfigError, match="fp16=True"):
            make_accelerator(args)


EVERY = (
    numerics_are_those_of_one_process, half_the_bytes_of_bf16_are_gathered, evaluation_generation_and_averages,
    a_trainer_is_told_by_the_launcher, words_of_accelerate, refusals,
)  # fmt: skip


def test_two_ranks(folder: Path, tmp_path: Path) -> None:
    run_ranks(run_cases, 2, EVERY, folder, tmp_path)


COMPILED = ("rowwise_with_gw_hp", {"compile": {"backend": "aot_eager"}})
RARELY = [pytest.param(*way, marks=pytest.mark.nightly) for way in (("rowwise", {}), COMPILED)]


@pytest.mark.parametrize(("recipe", "options"), [("tensorwise", {}), *RARELY])
def test_layers_shared_by_ranks(tmp_path: Path, recipe: str, options: dict[str, Any]) -> None:
    llama(vocab_size=132).save_pretrained(tmp_path)
    run_ranks(layers_shared_by_ranks, 2, recipe, options, tmp_path)


def _gradients(folder: Path) -> tuple[dict[str, torch.Tensor], list[torch.Size]]:
    model = load(folder, FP32)
    ids = rows_of(dist.get_rank(), dist.get_world_size())[0][0]
    with counted() as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    assert seen["all-reduces"][0] == PER_BLOCK * SIZES["num_hidden_layers"]
    return full_gradients(model), [p.to_local().shape for p in model.parameters()]


def test_uneven_shards(folder: Path) -> None:
    """The gradients of one process, but for the order in which more than two are summed."""
    model = by_torchao()
    for rank in range(3):
        ids = rows_of(rank, 3)[0][0]
        (model(input_ids=ids, labels=ids).loss / 3).backward()
    ranks = run_ranks(_gradients, 3, folder)
    assert len({tuple(shapes) for _, shapes in ranks}) > 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ranks[0][0][name], parameter.grad, rtol=1e-5, atol=1e-7)


# ---- without ranks ----


def test_routers_experts_and_tied_layers_are_left() -> None:
    sizes = {**SIZES, "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, decoder_sparse_step=1))
    model.model.layers[0].mlp.gate = torch.nn.Linear(64, 16, bias=False)  # a router that is a plain layer
    names = {name.split(".")[3] for name in float8_layers(ModuleTree(model), FP32)}
    assert names == {"self_attn"}
    inside = hf.AfmoeConfig(**sizes, num_dense_layers=0)  # a router that has its layer in it
    assert not any(".router." in name for name in float8_layers(ModuleTree(hf.AfmoeForCausalLM(inside)), FP32))
    mamba = hf.MambaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, state_size=16, time_step_rank=16)
    layers = float8_layers(ModuleTree(hf.MambaForCausalLM(mamba)), FP32)  # kernels take the weights of the others
    assert {name.rpartition(".")[2] for name in layers} == {"in_proj"}
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has no plain linear layer"):
        float8_layers(ModuleTree(make_model("gpt2")), FP32)


@pytest.mark.parametrize(
    ("capability", "policy", "said"),
    [((8, 0), FP32, "8.9"), ((8, 9), replace(FP32, config="rowwise"), "9.0"), ((8, 9), FP32, None)],
)
def test_gpus_that_cannot(monkeypatch: pytest.MonkeyPatch, capability: Any, policy: Any, said: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    if said is None:
        assert not float8_config(policy, "cuda").emulate
        return
    with pytest.raises(ConfigError, match=f"{said}.*A100 has .*Use bf16"):
        float8_config(policy, "cuda")
    with pytest.raises(ConfigError, match="this device is mps"):
        float8_config(policy, "mps")


def test_torchao_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise ImportError(f"No package metadata was found for {name}")

    float8.import_torchao.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="pip install torchao"):
        make_accelerator(mixed_precision="fp8", cpu=True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(ConfigError, match=r"0\.16 or newer"):
        float8_config(FP32, "cpu")
