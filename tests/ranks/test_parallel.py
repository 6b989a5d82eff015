"""Layers and experts that ranks share compute what one process does: losses, norms, steps, copies, adapters, hosts."""

import os
from contextlib import nullcontext
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import FSDPPlugin, ParallelDims, from_pretrained, make_accelerator, save_pretrained
from hf_fsdp_tools.distributed.mesh import axes_of
from hf_fsdp_tools.steps import build_meta_model, make_wrap_plan, parallelize_model, shard_model
from tests._checkpoints import randomize, refusal, tiny_config
from tests._dist import run_cases, run_ranks
from tests.api import clip_norm, local_tensor, part_of, patched

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 has it")

PAIRS = [ParallelDims(tp_size=2), ParallelDims(ep_size=2)]
BOTH = ParallelDims(tp_size=2, ep_size=2)
FOURS = [
    ParallelDims(tp_size=2, dp_shard_size=2),
    BOTH,
    ParallelDims(ep_size=2),
    ParallelDims(ep_size=4, tp_size=2),
    ParallelDims(dp_replicate_size=2, ep_size=2),
    ParallelDims(dp_replicate_size=2, tp_size=2),
    ParallelDims(ep_size=2, cp_size=2),
    ParallelDims(tp_size=2, cp_size=2),
]
KINDS = [("deepseek_v3", PAIRS[0]), ("deepseek_v3", PAIRS[1]), ("mixtral", PAIRS[1]), ("gpt_oss", PAIRS[1])]
REPLICAS = ParallelDims(dp_replicate_size=2)
KINDS_OF_FOUR = [("qwen3_moe", dims) for dims in FOURS]
OPTIONS = [{"activation_checkpointing": True}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}]


@cache
def folder_of(kind: str, parent: Path) -> Path:
    """A checkpoint of four experts and four heads, two of keys; each rank calls, one writes."""
    folder = parent / kind
    if not (folder / "config.json").exists() and dist.get_rank() == 0:
        randomize(AutoModelForCausalLM.from_config(tiny_config(kind, 2))).save_pretrained(folder)
    dist.barrier()
    return folder


def rows(dims: ParallelDims, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all ranks, and those of this rank."""
    replicas = dist.get_world_size() // dims.ranks_per_row
    ids = torch.randint(3, 60, (replicas, 12), generator=torch.Generator().manual_seed(step))
    own = dist.get_rank() // dims.ranks_per_row
    return ids, ids[own : own + 1]


def apart(found: torch.Tensor, whole: torch.Tensor) -> float:
    """How far this rank's part of a tensor is from that of a whole one."""
    mine, theirs = local_tensor(found), part_of(whole, found) if isinstance(found, DTensor) else whole
    return float((mine - theirs).abs().max()) if mine.numel() else 0.0


def layout_trains(kind, dims, parent, **options):
    """Accumulation, clipping and steps of an optimizer; every weight after two steps, one of two micro-batches."""
    folder = folder_of(kind, parent)
    model = from_pretrained(folder, mesh=dims, load_kwargs={"progress": False}, **options).train()
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
    for parts in ((0, 1), (2,)):
        for part in parts:
            everyone, mine = rows(dims, part)
            loss = model(input_ids=mine, labels=mine, use_cache=False).loss
            loss.backward()
            losses = [plain(input_ids=each[None], labels=each[None]).loss for each in everyone]
            (sum(losses) / len(losses)).backward()
            torch.testing.assert_close(loss.detach(), losses[dist.get_rank() // dims.ranks_per_row].detach())
        norm = clip_norm(model.parameters(), 0.5, 2.0, torch.device("cpu"))
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    worst = max((apart(p, plain.get_parameter(name)), name) for name, p in model.named_parameters())
    assert worst[0] < 2e-5, worst


ADAPTERS = {
    "llama": {"target_modules": ["q_proj", "o_proj", "lm_head", "embed_tokens"]},
    "llama, trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "qwen3_moe": {
        "target_modules": ["q_proj", "o_proj", "experts.gate_up_proj"],  # which PEFT turns into a parameter
        "target_parameters": ["experts.down_proj"],
    },
    "mixtral": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "gpt_oss": {"target_modules": ["v_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


def _adapted(kind: str, dims: ParallelDims, of: ParallelDims, parent: Path, name: str) -> Any:
    """Loss, norm and gradients of LoRA under a layout on the rows of another, and the folder in which it is saved."""
    config = LoraConfig(r=3, init_lora_weights=False, **ADAPTERS[kind])
    load_kwargs = {"progress": False, "seed": 3}
    folder = folder_of(kind.partition(",")[0], parent)
    model = from_pretrained(folder, mesh=dims, peft_config=config, load_kwargs=load_kwargs).train()
    _, mine = rows(of, 0)
    loss = model(input_ids=mine, labels=mine, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: each.full_tensor() for name, each in gradients.items()} if dims == ParallelDims() else gradients
    norm = clip_norm(model.parameters(), 1e9, 2.0, torch.device("cpu"))
    save_pretrained(model, parent / name)
    return loss.detach(), norm, whole, parent / name / "adapter_model.safetensors", model


def adapters_are_divided(kinds, layouts, parent):
    """LoRA of column- and row-wise layers, the head, a table, and experts: as on one axis, saved alike, and loaded."""
    for kind in kinds:
        for dims in layouts:
            what = f"{kind} {dims}"
            loss, norm, gradients, file, _ = _adapted(kind, ParallelDims(), dims, parent, f"{what} plain")
            ours, own_norm, own, saved, model = _adapted(kind, dims, dims, parent, what)
            torch.testing.assert_close((ours, own_norm), (loss, norm), msg=lambda text, w=what: f"{w}: {text}")
            assert own.keys() == gradients.keys(), what
            worst = max((apart(own[name], whole), name) for name, whole in gradients.items())
            assert worst[0] < 2e-6, (what, worst)
            assert saved.read_bytes() == file.read_bytes(), what
            again = from_pretrained(saved.parent, mesh=dims, is_trainable=True, load_kwargs={"progress": False})
            for name, parameter in model.named_parameters():
                assert torch.equal(local_tensor(parameter), local_tensor(again.get_parameter(name))), (what, name)


def adapters_that_cannot_be_divided(parent):
    folder = folder_of("qwen3_moe", parent)
    for dims, options, said in (
        (PAIRS[0], {"target_parameters": ["q_proj.weight"]}, "q_proj: a ParamWrapper of PEFT cannot be divided"),
        (
            PAIRS[0],
            {"target_modules": ["q_proj"], "use_dora": True},
            "DoRA takes norms over whole rows of the base, which",
        ),
    ):
        config = LoraConfig(**options)
        message = refusal(lambda d=dims, c=config: from_pretrained(folder, mesh=d, peft_config=c))
        assert said in message and "\n" not in message


def refused_before_anything_is_loaded(parent):
    """What a device or a layer lacks is one error on each rank; layers shared by machines are a warning."""
    moe, llama = folder_of("qwen3_moe", parent), folder_of("llama", parent)
    rule = {"model.layers.*.input_layernorm": "colwise"}
    for folder, options, said in (
        (moe, {"mesh": PAIRS[1], "experts_implementation": "deepgemm"}, "has no kernels for CPUs. Use 'grouped_mm'"),
        (llama, {"distributed_config": {"tp_size": 2, "tp_plan": rule}}, "input_layernorm the style 'colwise', which"),
        (llama, {"distributed_config": {"tp_size": 0, "fsdp_size": 2}}, "tp_size is 0; it must be a whole number"),
    ):
        with patched(load_weights=Mock(side_effect=AssertionError("it was loaded"))):
            message = refusal(lambda f=folder, o=options: from_pretrained(f, **o))
        assert said in message and "\n" not in message
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    is_first = dist.get_rank() == 0
    with pytest.warns(UserWarning, match="does not divide the 1 process") if is_first else nullcontext():
        parallelize_model(build_meta_model(llama), PAIRS[0].build_mesh())


def logits_stay_in_parts(parent):
    """In training with labels each rank has the logits of its words; in evaluation, and without labels, all."""
    folder = folder_of("llama", parent)
    model = from_pretrained(folder, mesh=PAIRS[0], load_kwargs={"progress": False})
    plain = AutoModelForCausalLM.from_pretrained(folder)
    _, mine = rows(PAIRS[0], 0)
    labels = mine.clone()
    labels[:, :3] = -100
    expected = plain(input_ids=mine, labels=labels)
    for is_training in (True, False):
        output = model.train(is_training)(input_ids=mine, labels=labels)
        torch.testing.assert_close(output.loss, expected.loss)
        logits = output.logits
        assert isinstance(logits, DTensor) == is_training
        if is_training:
            assert logits.to_local().shape[-1] == expected.logits.shape[-1] // 2
            logits = logits.full_tensor()
        torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert not isinstance(model.train()(input_ids=mine).logits, DTensor)
    counted = model(input_ids=mine, labels=labels, num_items_in_batch=torch.tensor(4)).loss
    torch.testing.assert_close(counted, plain(input_ids=mine, labels=labels, num_items_in_batch=4).loss)
    with pytest.raises(match="ep_size 3 does not divide the 2 processes"):
        make_accelerator(cpu=True, fsdp_plugin=FSDPPlugin(ep_size=3))


def asked_as_transformers_does(parent):
    from transformers.distributed import DistributedConfig

    folder = folder_of("qwen3_moe", parent)
    config = DistributedConfig(tp_size=2, tp_plan={"model.layers.*.self_attn.q_proj": "replicate"}, fsdp_size=2)
    config.tp_plan |= {f"model.layers.*.self_attn.{name}": "replicate" for name in ("k_proj", "v_proj", "o_proj")}
    config.tp_plan |= {f"model.layers.*.self_attn.{name}": "replicate" for name in ("q_norm", "k_norm")}
    model = from_pretrained(folder, distributed_config=config, load_kwargs={"progress": False})
    assert model.model.layers[0].self_attn.q_proj.weight.device_mesh.ndim == 1
    assert model.lm_head.weight.device_mesh.shape == (2, 2)
    _, mine = rows(ParallelDims(tp_size=2), 0)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(model(input_ids=mine).logits, plain(input_ids=mine).logits, rtol=1e-4, atol=1e-5)
    config = {"ep_size": 2}  # the rest of the processes shards
    assert axes_of(from_pretrained(folder, distributed_config=config).lm_head.weight.device_mesh).shards.size() == 4
    for config, end in (({"tp_sizes": 2}, "did you mean tp_size"), ({"fsdp_cpu_offload": True}, "Leave it out")):
        said = refusal(partial(from_pretrained, folder, distributed_config=config))
        assert f"distributed_config: {next(iter(config))}" in said and end in said
    said = refusal(lambda: from_pretrained(folder, distributed_config={"pp_size": 2}))
    assert "pipeline parallelism is not part of this package" in said


def in_public_steps(parent):
    folder = folder_of("qwen3_moe", parent)
    mesh = ParallelDims(tp_size=2, ep_size=2).build_mesh()
    model = build_meta_model(folder)
    said = refusal(lambda: shard_model(model, make_wrap_plan(model), mesh=mesh))
    assert "is not divided. Call parallelize_model(model, mesh) before make_wrap_plan" in said
    parallelize_model(model, mesh)
    plan = make_wrap_plan(model)
    reasons = {unit.reason for unit in plan.units if unit.modules[0].endswith("mlp.experts")}
    assert reasons == {"experts that ranks share"}
    shard_model(model, plan, mesh=mesh)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert experts.device_mesh.shape == (2, 2) and local_tensor(experts).shape[0] == 1  # of four: two ranks by two
    assert axes_of(mesh).dims == ParallelDims(dp_shard_size=2, tp_size=2, ep_size=2)
    assert "sharded already" in refusal(lambda: parallelize_model(model, mesh))


@pytest.mark.parametrize(("ranks", "kinds"), [(2, KINDS[:1]), *(pytest.param(n, kinds, marks=pytest.mark.nightly)
                         for n, kinds in ((2, KINDS[1:]), (4, KINDS_OF_FOUR)))])  # fmt: skip
def test_ranks_train_as_one_process(tmp_path, ranks, kinds):
    """In turn recomputed, offloaded, or neither."""
    options = [*zip(kinds, cycle(OPTIONS))]
    cases = {f"{kind}, {option}": partial(layout_trains, *kind, tmp_path, **option) for kind, option in options}
    run_ranks(run_cases, ranks, cases)


def test_what_else_is_done_by_two_ranks(tmp_path):
    cases = {
        "adapters of layers": partial(adapters_are_divided, ("llama",), PAIRS[:1], tmp_path),
        "adapters of experts": partial(adapters_are_divided, ("qwen3_moe",), PAIRS[1:], tmp_path),
        "refused adapters": partial(adapters_that_cannot_be_divided, tmp_path),
        "refused": partial(refused_before_anything_is_loaded, tmp_path),
        "logits": partial(logits_stay_in_parts, tmp_path),
    }
    run_ranks(run_cases, 2, cases)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "kind", "dims"),
    [(2, "llama", PAIRS[0]), (2, "llama", ParallelDims(cp_size=2)), (2, "qwen3_moe", PAIRS[1]), (4, "llama", REPLICAS)],
)
def test_compiled_layouts(tmp_path, ranks, kind, dims):
    run_ranks(partial(layout_trains, compile={"backend": "aot_eager"}), ranks, kind, dims, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "kind", "layouts"),
    [(2, "gpt_oss", PAIRS), (4, "qwen3_moe", FOURS[:4]), (4, "llama, trained whole", FOURS[:1])],
)
def test_four_ranks_divide_adapters(tmp_path, ranks, kind, layouts):
    """Also a layer that is trained whole, cut among the ranks of a layer and again among shards."""
    run_ranks(adapters_are_divided, ranks, (kind,), layouts, tmp_path)


def test_layouts_are_asked_for_in_the_words_of_others(tmp_path):
    run_ranks(run_cases, 4, [asked_as_transformers_does, in_public_steps], tmp_path)
