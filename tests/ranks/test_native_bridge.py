"""Models that other code has sharded with FSDP2: transformers while it loads (`DistributedConfig`), `fully_shard`."""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Dinov2Config, Dinov2Model

from hf_fsdp_tools import (
    ConfigError,
    HybridFSDPPlugin,
    export_checkpoint,
    live_weights,
    load_weights,
    save_pretrained,
    wait_for_saves,
)
from hf_fsdp_tools.integrations.model import take_up_as_made
from hf_fsdp_tools.sharding.native import REASON
from hf_fsdp_tools.sharding.shard import checkpoint_activations, sharding_of
from tests._checkpoints import full, randomize, stored_tensors
from tests._dist import run_cases, run_ranks
from tests._training import (
    ShardedTrainer,
    apart,
    arguments,
    full_gradients,
    full_parameters,
    logged,
    make_rows,
    new_accelerator,
)

try:
    from transformers.distributed import DistributedConfig

    _HAS_FSDP = {"fsdp_size", "dp_replicate_size"} <= set(DistributedConfig.__dataclass_fields__)
except ImportError:
    _HAS_FSDP = False
pytestmark = pytest.mark.skipif(not _HAS_FSDP, reason="this version of transformers has no replicas under FSDP2")

BF16 = torch.bfloat16
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({}, "no"),
    "mixed": ({"fsdp_mixed_precision": True}, "bf16"),
    "bf16": ({"dtype": BF16}, "no"),
    "HSDP": ({"fsdp_size": 1, "dp_replicate_size": 2}, "no"),
    "offloaded": ({"fsdp_cpu_offload": True}, "no"),
}
"""Arguments of `DistributedConfig` and the dtype, and the precision of the Accelerator."""
KINDS = ("llama", "tied", "mixtral", "qwen2_moe", "deepseek_v3")
LORA = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")


def native(source: Path, *, dtype: torch.dtype | None = None, **sizes: Any) -> Any:
    """The model of a folder, as transformers itself shards it while it loads."""
    config = DistributedConfig(**{"fsdp_size": dist.get_world_size()} | sizes)
    options = {} if dtype is None else {"dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(source, distributed_config=config, attention_dropout=0.1, **options)


def whole(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every parameter and every tensor of its optimizer's state, gathered."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {name: parameter for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        tensors |= {f"{names[parameter]}.{key}": value for key, value in state.items()}
    return {name: full(tensor).clone() for name, tensor in tensors.items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


class Loop:
    """A user's script with dropout, on a model that transformers has sharded."""

    def __init__(self, source: Path, sizes: dict[str, Any], precision: str, **plugin: Any) -> None:
        options = {"fsdp_plugin": HybridFSDPPlugin(**plugin)} if plugin else {}
        self.accelerator = new_accelerator(mixed_precision=precision, **options)
        set_seed(3)
        model = native(source, **sizes)
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(make_rows(48), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model.train(), made, loader)
        self.batches = iter(self.loader)

    def skip(self, count: int) -> None:
        self.batches = iter(self.accelerator.skip_first_batches(self.loader, count))

    def train(self, steps: int = 2) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(**next(self.batches)).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


# ---- two ranks ----


def files_are_the_plain_ones(sources, out):
    for kind in KINDS:
        model = native(sources[kind])
        save_pretrained(model, out / f"{kind} saved", max_shard_size="60KB")
        found, expected = stored_tensors(out / f"{kind} saved"), stored_tensors(sources[kind])
        assert same(found, expected), kind
        weights = live_weights(model)
        assert {name: tensor.shape for name, tensor in weights.tensors.items()} == {
            name: tuple(tensor.shape) for name, tensor in expected.items()
        }
        for part in weights.parts():
            assert torch.equal(part.values(), expected[part.name][part.box.slices]), part.name
    config, plain = (AutoModelForCausalLM.from_pretrained(p).config for p in (out / "llama saved", sources["llama"]))
    config.attention_dropout = plain.attention_dropout
    assert config.to_diff_dict() == plain.to_diff_dict()


def a_loop_goes_on(name, sources, out):
    sizes, precision = LAYOUTS[name]
    source = sources["tied" if name == "mixed" else "llama"]
    first = Loop(source, sizes, precision)
    assert sharding_of(first.model).plan.units[0].reason == REASON
    first.train()
    first.accelerator.save_state(out / name, blocking=name == "HSDP")
    saved = whole(first.model, first.optimizer)
    expected = first.train()
    wait_for_saves()
    other = Loop(source, sizes, precision)
    other.accelerator.load_state(out / name)
    assert same(whole(other.model, other.optimizer), saved)
    other.skip(2)
    assert other.train() == expected
    assert same(whole(other.model, other.optimizer), whole(first.model, first.optimizer))
    export_checkpoint(out / name, out / f"{name} exported", config=source)
    exported = AutoModelForCausalLM.from_pretrained(out / f"{name} exported", dtype=sizes.get("dtype"))
    assert all(torch.equal(parameter, saved[key]) for key, parameter in exported.named_parameters())
    return saved, expected


def _trainer(source: Path, out: Path, sizes: dict[str, Any], **settings: Any) -> ShardedTrainer:
    args = arguments(out, max_steps=4, seed=5, **settings)
    return ShardedTrainer(native(source, **sizes), args, train_dataset=make_rows(24))


def a_trainer_goes_on(name, sources, out):
    sizes, precision = LAYOUTS[name]
    settings = {"bf16": precision == "bf16"}
    first = _trainer(sources["llama"], out / name, sizes, save_strategy="steps", save_steps=2, **settings)
    first.blocking = False
    first.train()
    second = _trainer(sources["llama"], out / name, sizes, **settings)
    second.train(resume_from_checkpoint=str(out / name / "checkpoint-2"))
    assert logged(second)[-2:] == logged(first)[-2:] and len(logged(second)) == 4
    found = whole(second.model, second.optimizer.optimizer)
    assert same(found, whole(first.model, first.optimizer.optimizer))
    first.save_model(str(out / name / "final"))
    plain = AutoModelForCausalLM.from_pretrained(out / name / "final", dtype=sizes.get("dtype"))
    assert all(torch.equal(parameter, found[key]) for key, parameter in plain.named_parameters())
    return logged(first)


def what_cannot_be_taken_up_is_refused(sources, out):
    accelerator = new_accelerator(mixed_precision="bf16")
    with pytest.raises(ConfigError, match=r"computes in bf16.*DistributedConfig.fsdp_mixed_precision=True."):
        accelerator.prepare(native(sources["llama"]))
    with pytest.raises(ConfigError, match=r"settled otherwise already.*cpu_offload"):
        ShardedTrainer(
            native(sources["llama"]),
            arguments(out / "late", fsdp=True, fsdp_config={"cpu_offload": True}),
            train_dataset=make_rows(8),
        )
    accelerator = new_accelerator()
    for sizes in ({"tp_size": 2, "fsdp_size": 1}, {"ep_size": 2}):
        model = native(sources["mixtral"], **sizes)
        with pytest.raises(ConfigError, match=r"not by FSDP2 alone .(tp|ep)_size.*DistributedConfig.fsdp_size"):
            accelerator.prepare(model)
        folder = out / f"divided {sizes}"
        save_pretrained(model, folder)
        assert same(stored_tensors(folder), stored_tensors(sources["mixtral"])), "saved all the same"
    accelerator = new_accelerator(fsdp_plugin=HybridFSDPPlugin(fsdp_version=1))
    with pytest.raises(ConfigError, match=r"sharded by FSDP2 already.*fsdp_version 2"):
        accelerator.prepare(native(sources["llama"]), torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))


def wrong_weights_are_named_and_cured(sources, out):
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4, use_swiglu_ffn=True
    )
    if dist.get_rank() == 0:
        randomize(Dinov2Model(config)).save_pretrained(out / "dinov2")
    dist.barrier()
    plain = Dinov2Model.from_pretrained(out / "dinov2")
    sizes = DistributedConfig(fsdp_size=2, fsdp_plan={"encoder.layer.*": "free_full_weight"})
    model = Dinov2Model.from_pretrained(out / "dinov2", distributed_config=sizes)
    found, expected = full_parameters(model), full_parameters(plain)
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert len(wrong) == 8, wrong
    said = _warnings(partial(take_up_as_made, model))
    assert len(said) == (1 if dist.get_rank() == 0 else 0)
    if said:
        assert "loads 8 parameters of Dinov2Model wrongly into shards" in said[0] and "Call load_weights" in said[0]
    load_weights(model, out / "dinov2", progress=False)
    assert apart(full_parameters(model), expected) == 0.0
    again = Dinov2Model.from_pretrained(out / "dinov2", distributed_config=sizes)
    load_weights(again, out / "dinov2", progress=False)
    assert not _warnings(partial(take_up_as_made, again)), "cured before"
    assert not _warnings(lambda: take_up_as_made(native(sources["mixtral"]))), "stacks of experts are right"


def _warnings(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if "wrongly" in str(each.message)]


def its_methods_are_those_of_shards(sources, out):
    """A copy, new rows of the vocabulary, texts, an adapter: as of a model of `from_pretrained`."""
    accelerator = new_accelerator()
    prompt = torch.tensor([[3, 4]])
    plain = AutoModelForCausalLM.from_pretrained(sources["llama"])
    model = accelerator.prepare(native(sources["llama"]))
    twin = copy.deepcopy(model)
    assert apart(full_parameters(twin), full_parameters(plain)) == 0.0
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(twin.eval()(input_ids=ids).logits, plain(input_ids=ids).logits)
    text = model.eval().generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(text, plain.generate(prompt, max_new_tokens=4, do_sample=False))
    model.resize_token_embeddings(140)
    model.save_pretrained(out / "resized")
    assert AutoModelForCausalLM.from_pretrained(out / "resized").lm_head.weight.shape == (140, 48)
    losses = []
    for make in (partial(native, fsdp_mixed_precision=True), AutoModelForCausalLM.from_pretrained):
        accelerator = new_accelerator(mixed_precision="bf16")
        torch.manual_seed(5)
        model = get_peft_model(make(sources["llama"]).eval(), LORA)
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        )
        losses.append([])
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        save_pretrained(model, out / f"adapter {len(losses)}")
    assert losses[0] == pytest.approx(losses[1], rel=1e-3), "only the casts differ"
    found, expected = (stored_tensors(out / f"adapter {i}") for i in (1, 2))
    assert found.keys() == expected.keys() and all(found[key].shape == expected[key].shape for key in found)


def ranks_may_leave_layers_out(sources, out):
    """Rank 1 ends after its first layer; gradients are the mean of those of two plain models."""
    ids = torch.arange(3, 15)[None]
    plain = AutoModelForCausalLM.from_pretrained(sources["llama"])
    for layers in (2, 1):
        plain.config.num_hidden_layers = layers
        (plain(input_ids=ids, labels=ids).loss / 2).backward()
    accelerator = new_accelerator()
    model = accelerator.prepare(native(sources["llama"]))
    model.config.num_hidden_layers = 2 - dist.get_rank()
    accelerator.backward(model.eval()(input_ids=ids, labels=ids).loss)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert apart(full_gradients(model), expected) < 1e-5


def compiled_or_recomputed(sources, out):
    """What comes after sharding: blocks are compiled, activations recomputed; the losses stay."""
    ids, found = torch.arange(3, 15)[None], []
    for settings in (
        {},
        {"dynamo_backend": "aot_eager"},
        {"fsdp_plugin": HybridFSDPPlugin(activation_checkpointing=True)},
    ):
        accelerator = new_accelerator(**settings)
        model = native(sources["llama"]).eval()
        if "fsdp_plugin" in settings:
            checkpoint_activations(model)
            model.train().config.attention_dropout = 0.0
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.0
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert (sharding_of(model).activation_checkpointing is not None) == ("fsdp_plugin" in settings)
        assert (sharding_of(model).compile is not None) == ("dynamo_backend" in settings)
        found.append([])
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found[-1].append(loss.item())
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[2] == pytest.approx(found[0], rel=1e-5)


def tied_weights_learn(sources, out):
    """131 rows on 2 ranks: as transformers makes it, the embedding of rank 1 never changes, and only the head does."""
    ids = torch.arange(100, 131)[None]
    found = []
    for make in (AutoModelForCausalLM.from_pretrained, native):
        accelerator = new_accelerator()
        model = make(sources["tied"]).eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if make is native:
            model, optimizer = accelerator.prepare(model, optimizer)
            assert ("model.embed_tokens", "model.norm", "lm_head") in [u.modules for u in sharding_of(model).plan.units]
        found.append([])
        for _ in range(4):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[-1].append(loss.item())
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def sharded_by_a_script(sources, out):
    """The user's own `fully_shard`: one way for all units is taken up, a mixture is left as it is, and both train."""
    accelerator = new_accelerator()
    for policies in ((None, None), (MixedPrecisionPolicy(param_dtype=BF16), None)):
        model = AutoModelForCausalLM.from_pretrained(sources["llama"])
        for layer, policy in zip(model.model.layers, policies, strict=True):
            fully_shard(layer, **({"mp_policy": policy} if policy else {}))
        fully_shard(model)
        is_mixed = policies[0] is not None
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert (sharding_of(model) is None) == is_mixed
        ids = torch.arange(3, 15)[None]
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        accelerator.save_model(model, out / f"script {is_mixed}")
        saved = AutoModelForCausalLM.from_pretrained(out / f"script {is_mixed}")
        assert apart(full_parameters(model), full_parameters(saved)) == 0.0
    plan = sharding_of(accelerator._models[-2]).plan
    assert [unit.modules for unit in plan.units] == [("model.layers.0",), ("model.layers.1",), ("",)]
    assert [unit.reshard_after_forward for unit in plan.units] == [None, None, None]


CASES = (
    files_are_the_plain_ones,
    what_cannot_be_taken_up_is_refused,
    wrong_weights_are_named_and_cured,
    its_methods_are_those_of_shards,
    ranks_may_leave_layers_out,
    compiled_or_recomputed,
    tied_weights_learn,
    sharded_by_a_script,
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def on_two_ranks(folders, out) -> Any:
    """What a loop and a Trainer saved on 2 ranks, and the losses that followed."""
    cases = {f"loop {name}": partial(a_loop_goes_on, name) for name in LAYOUTS}
    cases |= {f"trainer {name}": partial(a_trainer_goes_on, name) for name in ("fp32", "mixed")}
    return run_ranks(run_cases, 2, cases, {kind: folders[kind] for kind in KINDS}, out, timeout_s=300)[0]


def test_a_model_that_other_code_sharded_is_taken_up_as_it_was_made(folders, tmp_path):
    run_ranks(run_cases, 2, CASES, {kind: folders[kind] for kind in KINDS}, tmp_path, timeout_s=300)


def on_three_ranks(sources, out, former):
    for name in ("fp32", "mixed"):
        sizes, precision = LAYOUTS[name]
        loop = Loop(sources["tied" if name == "mixed" else "llama"], sizes, precision)
        with pytest.warns(UserWarning, match=r"saved by 2 process.*read by 3") if dist.get_rank() == 0 else _quiet():
            loop.accelerator.load_state(out / name)
        assert same(whole(loop.model, loop.optimizer), former[f"loop {name}"][0]), "weights and optimizer, to the bit"
        loop.train(1)
        trainer = _trainer(sources["llama"], out / name, sizes, bf16=precision == "bf16")
        trainer.train(resume_from_checkpoint=str(out / name / "checkpoint-2"))
        assert len(logged(trainer)) == 4 and logged(trainer)[:2] == former[f"trainer {name}"][:2]


def _quiet() -> Any:
    return warnings.catch_warnings()


def test_it_goes_on_where_it_was_and_on_another_number_of_ranks(folders, out, on_two_ranks):
    run_ranks(on_three_ranks, 3, {kind: folders[kind] for kind in KINDS}, out, on_two_ranks, timeout_s=300)
