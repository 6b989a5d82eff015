"""Layers and experts that ranks share compute what one process does: losses, norms, steps, adapters; files and bytes do
not know of it; and loader, Trainer and the names of a mesh agree on who shares rows."""

import os
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import (
    ConfigError,
    FSDPPlugin,
    ParallelDims,
    ParameterEMA,
    clip_grad_norm_,
    export_checkpoint,
    from_pretrained,
    make_accelerator,
    resize_token_embeddings,
    save_pretrained,
)
from hf_fsdp_tools.distributed.mesh import axes_of
from hf_fsdp_tools.errors import MeshError
from hf_fsdp_tools.steps import build_meta_model, make_wrap_plan, parallelize_model, shard_model
from tests._checkpoints import (
    assert_same_tensors,
    dequantized_by_transformers,
    full,
    gpt_oss,
    make_quantized,
    randomize,
    refusal,
    stored_tensors,
    tiny_config,
)
from tests._dist import named, run_cases, run_ranks
from tests._noted import Operators
from tests._training import ShardedTrainer, arguments, make_rows, new_accelerator
from tests.api import Held, all_ranks, clip_norm, patched
from tests.ranks.test_save import files_in, save_both_ways

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 has it")

TP, EP = PAIRS = [ParallelDims(tp_size=2), ParallelDims(ep_size=2)]
QUIET = {"load_kwargs": {"progress": False}}
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
KINDS = {  # by the number of ranks
    2: [("deepseek_v3", TP), ("deepseek_v3", EP), ("mixtral", EP), ("gpt_oss", EP)],
    4: [("qwen3_moe", dims) for dims in FOURS],
}
COMPILED = {2: [("llama", TP), ("llama", ParallelDims(cp_size=2)), ("qwen3_moe", EP)], 4: [("llama", FOURS[5])]}
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
    mine, theirs = Held.of(found).memory, Held.of(found).part_of(whole) if isinstance(found, DTensor) else whole
    return float((mine - theirs).abs().max()) if mine.numel() else 0.0


def layout_trains(kind, dims, parent, **options):
    """Accumulation, clipping and steps of an optimizer; every weight after two steps, one of two micro-batches."""
    folder = folder_of(kind, parent)
    model = from_pretrained(folder, mesh=dims, **QUIET, **options).train()
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
    "qwen3_moe": {
        "target_modules": ["q_proj", "o_proj", "experts.gate_up_proj"],  # which PEFT turns into a parameter
        "target_parameters": ["experts.down_proj"],
    },
}


def _adapted(kind: str, dims: ParallelDims, of: ParallelDims, parent: Path, name: str) -> Any:
    """Loss, norm and gradients of LoRA under a layout on the rows of another, and the folder in which it is saved."""
    config = LoraConfig(r=3, init_lora_weights=False, **ADAPTERS[kind])
    load_kwargs = {"progress": False, "seed": 3}
    folder = folder_of(kind, parent)
    model = from_pretrained(folder, mesh=dims, peft_config=config, load_kwargs=load_kwargs).train()
    _, mine = rows(of, 0)
    loss = model(input_ids=mine, labels=mine, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: each.full_tensor() for name, each in gradients.items()} if dims == ParallelDims() else gradients
    norm = clip_norm(model.parameters(), 1e9, 2.0, torch.device("cpu"))
    save_pretrained(model, parent / name)
    return loss.detach(), norm, whole, parent / name / "adapter_model.safetensors", model


def adapters_are_divided(kind, dims, parent):
    """LoRA of column- and row-wise layers, the head, a table, and experts: as on one axis, saved alike, and loaded."""
    what = f"{kind} {dims}"
    loss, norm, gradients, file, _ = _adapted(kind, ParallelDims(), dims, parent, f"{what} plain")
    ours, own_norm, own, saved, model = _adapted(kind, dims, dims, parent, what)
    torch.testing.assert_close((ours, own_norm), (loss, norm), msg=lambda text, w=what: f"{w}: {text}")
    assert own.keys() == gradients.keys(), what
    worst = max((apart(own[name], whole), name) for name, whole in gradients.items())
    assert worst[0] < 2e-6, (what, worst)
    assert saved.read_bytes() == file.read_bytes(), what
    again = from_pretrained(saved.parent, mesh=dims, is_trainable=True, **QUIET)
    for name, parameter in model.named_parameters():
        assert torch.equal(Held.of(parameter).memory, Held.of(again.get_parameter(name)).memory), (what, name)


def refused(parent):
    """What a device or a layer lacks is one error on each rank; layers shared by machines are a warning."""
    moe, llama = folder_of("qwen3_moe", parent), folder_of("llama", parent)
    views, dora = LoraConfig(target_parameters=["q_proj.weight"]), LoraConfig(target_modules=["q_proj"], use_dora=True)
    rule = {"model.layers.*.input_layernorm": "colwise"}
    for folder, options, said in (
        (moe, {"mesh": TP, "peft_config": views}, "q_proj: a ParamWrapper of PEFT cannot be divided"),
        (moe, {"mesh": TP, "peft_config": dora}, "DoRA takes norms over whole rows of the base, which"),
        (moe, {"mesh": PAIRS[1], "experts_implementation": "deepgemm"}, "has no kernels for CPUs. Use 'grouped_mm'"),
        (llama, {"distributed_config": {"tp_size": 2, "tp_plan": rule}}, "input_layernorm the style 'colwise', which"),
        (llama, {"distributed_config": {"tp_size": 0, "fsdp_size": 2}}, "tp_size is 0; it must be a whole number"),
    ):
        message = refusal(lambda f=folder, o=options: from_pretrained(f, **o))
        assert said in message and "\n" not in message
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    is_first = dist.get_rank() == 0
    with pytest.warns(UserWarning, match="does not divide the 1 process") if is_first else nullcontext():
        parallelize_model(build_meta_model(llama), PAIRS[0].build_mesh())


def logits_stay_in_parts(parent):
    """In training with labels each rank has the logits of its words; in evaluation, and without labels, all."""
    folder = folder_of("llama", parent)
    model = from_pretrained(folder, mesh=PAIRS[0], **QUIET)
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
    with pytest.raises(ConfigError, match="ep_size 3 does not divide the 2 processes"):
        make_accelerator(cpu=True, fsdp_plugin=FSDPPlugin(ep_size=3))


KINDS_OF_EXCHANGE = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
OWN_TOKENS = {"distributed_config": {"enable_sequence_parallel": True}}


def own_tokens_lie_between_layers(parent):
    """Blocks and norms take a rank's tokens alone; layers, heads and whoever asks for hidden states get whole rows. Of
    the sums of layers and their gradients, parts are exchanged. Rows of odd length stay whole."""
    folder, dims = folder_of("llama", parent), PAIRS[0]
    _, mine = rows(dims, 0)
    seen: dict[str, set[int]] = {}
    exchanged: list[Counter[str]] = []
    for options in ({}, OWN_TOKENS):
        model = from_pretrained(folder, mesh=dims, **QUIET, **options).train()
        exchanged.append(Counter())
        with Operators(lambda operator, *_, noted=exchanged[-1]: noted.update([operator.name()]) or 0):
            model(input_ids=mine, labels=mine, use_cache=False).loss.backward()

    def note(module, args, *, name):
        seen.setdefault(name.rpartition(".")[2], set()).update(each.shape[1] for each in args[:1])

    for name, module in model.model.named_modules():
        module.register_forward_pre_hook(partial(note, name=name))
    model(input_ids=mine, labels=mine, use_cache=False)
    length, blocks = mine.shape[1], model.config.num_hidden_layers
    norms = ("input_layernorm", "post_attention_layernorm", "norm")
    assert [seen[name] for name in norms] == [{length // 2}] * 3
    assert seen["q_proj"] == seen["down_proj"] == {length}
    of_whole, of_own = ({kind: noted[f"_c10d_functional::{kind}"] for kind in KINDS_OF_EXCHANGE} for noted in exchanged)
    joins = 4 * blocks  # of two regions, forward and backward; and of what is embedded, and of the decoder's end
    assert of_own["reduce_scatter_tensor"] == joins and of_own["all_gather_into_tensor"] == joins + 2
    assert of_whole["all_reduce"] - of_own["all_reduce"] == 7 * blocks  # of as many divided layers
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for given in (mine, mine[:, :-1]):
        found = model(input_ids=given, output_hidden_states=True, use_cache=False).hidden_states
        expected = plain(input_ids=given, output_hidden_states=True).hidden_states
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert seen["input_layernorm"] == {length // 2, length - 1}
    assert "give tp_size above 1" in refusal(partial(from_pretrained, folder, mesh=ParallelDims(), **OWN_TOKENS))


def own_tokens_of_parts(parent):
    """Ranks that share rows and layers: norms see a quarter of a row, and layers one half."""
    dims, folder = ParallelDims(tp_size=2, cp_size=2), folder_of("llama", parent)
    model = from_pretrained(folder, mesh=dims, **QUIET, **OWN_TOKENS)
    _, mine = rows(dims, 0)
    layer, seen = model.model.layers[1], {}
    for module in (layer.input_layernorm, layer.mlp.gate_proj):
        module.register_forward_pre_hook(lambda module, args: seen.update({module: args[0].shape[1]}))
    model(input_ids=mine, labels=mine, use_cache=False)
    length = mine.shape[1]
    assert seen == {layer.input_layernorm: length // 4, layer.mlp.gate_proj: length // 2}
    odd = mine[:, :-1]  # of which a part is not one that the ranks divide, or is padded so that it is
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for given in (odd, mine[:, :-2]):
        torch.testing.assert_close(model(input_ids=given).logits, plain(input_ids=given).logits, rtol=1e-4, atol=1e-5)
    layout_trains("gpt_oss", dims, parent, **OWN_TOKENS)


def blocks_run_again_after_another_pass(parent):
    """Two passes before one backward pass, with activation checkpointing: of rows that the ranks divide, and do not."""
    folder, dims = folder_of("llama", parent), ParallelDims(tp_size=2)
    model = from_pretrained(folder, mesh=dims, activation_checkpointing=True, **QUIET, **OWN_TOKENS).train()
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    _, mine = rows(dims, 0)
    for each in (model, plain):
        passes = [each(input_ids=ids, labels=ids, use_cache=False).loss for ids in (mine, mine[:, :-1], mine[:, :8])]
        sum(passes).backward()
    worst = max((apart(p.grad, plain.get_parameter(name).grad), name) for name, p in model.named_parameters())
    assert worst[0] < 2e-5, worst


def asked_as_transformers_does(parent):
    from transformers.distributed import DistributedConfig

    folder = folder_of("qwen3_moe", parent)
    config = DistributedConfig(tp_size=2, tp_plan={"model.layers.*.self_attn.q_proj": "replicate"}, fsdp_size=2)
    config.tp_plan |= {f"model.layers.*.self_attn.{name}": "replicate" for name in ("k_proj", "v_proj", "o_proj")}
    config.tp_plan |= {f"model.layers.*.self_attn.{name}": "replicate" for name in ("q_norm", "k_norm")}
    model = from_pretrained(folder, distributed_config=config, **QUIET)
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
    assert experts.device_mesh.shape == (2, 2) and Held.of(experts).memory.shape[0] == 1  # of four: two ranks by two
    assert axes_of(mesh).dims == ParallelDims(dp_shard_size=2, tp_size=2, ep_size=2)
    assert "sharded already" in refusal(lambda: parallelize_model(model, mesh))


def test_two_ranks_train_as_one_process(tmp_path):
    run_ranks(partial(layout_trains, **OPTIONS[0]), 2, *KINDS[2][0], tmp_path)


def test_two_ranks_with_own_tokens_train_as_one_process(tmp_path):
    """Attention that is whole on every rank, layers with biases, experts, and vectors of all rows."""
    kinds = ("deepseek_v3", "gpt_oss", "llama4_text")
    cases = {kind: partial(layout_trains, kind, PAIRS[0], tmp_path, **OWN_TOKENS) for kind in kinds}
    cases["compiled"] = partial(layout_trains, "qwen3_moe", PAIRS[0], tmp_path, compile="aot_eager", **OWN_TOKENS)
    own = (own_tokens_lie_between_layers, blocks_run_again_after_another_pass)
    cases |= {each.__name__: partial(each, tmp_path) for each in own}
    run_ranks(run_cases, 2, cases)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_as_one_process(tmp_path, ranks):
    """In turn recomputed, offloaded, or neither; and compiled."""
    ways = [*zip(KINDS[ranks], cycle(OPTIONS)), *((kind, {"compile": "aot_eager"}) for kind in COMPILED[ranks])]
    cases = {f"{kind}, {option}": partial(layout_trains, *kind, tmp_path, **option) for kind, option in ways}
    run_ranks(run_cases, ranks, cases)


def test_what_else_is_done_by_two_ranks(tmp_path):
    cases = {
        "adapters of layers": partial(adapters_are_divided, "llama", TP),
        "adapters of experts": partial(adapters_are_divided, "qwen3_moe", EP),
        **named(refused, logits_stay_in_parts),
    }
    run_ranks(run_cases, 2, cases, tmp_path)


def test_layouts_are_asked_for_in_the_words_of_others(tmp_path):
    cases = named(asked_as_transformers_does, in_public_steps, own_tokens_of_parts)
    cases["experts of copies"] = partial(layout_trains, "qwen3_moe", FOURS[4])  # whose norm counts each once
    run_ranks(run_cases, 4, cases, tmp_path)


# ---- files, bytes, and states of others ----


def files_and_bytes_do_not_know_of_it(combinations, parent):
    """Each rank reads its part and, beside gaps of up to a page, no byte more; what plans leave whole is read by each
    rank of a layer. Saved at once and in the background: the files of one axis, and the tensors of one process."""
    for kind, dims, dtype in combinations:
        what, folder = (kind, dims, dtype), folder_of(kind, parent)
        with patched(MAX_GAP_BYTES=0):
            model, report = from_pretrained(folder, mesh=dims, dtype=dtype, **QUIET, output_loading_info=True)
        is_reader = dist.get_rank() < dist.get_world_size() // dims.dp_replicate_size
        held = 4 * sum(Held.of(parameter).memory.numel() for parameter in model.parameters())  # files hold fp32
        assert report.share_bytes == held and report.bytes_read == (held if is_reader else 0), what
        whole = [p for p in model.parameters() if p.device_mesh.size() * dims.tp_size == dist.get_world_size()]
        more = (dims.tp_size - 1) * sum(p.numel() * 4 for p in whole)
        total = sum(p.numel() * 4 for p in model.parameters())
        assert sum(all_ranks(report.bytes_read)) == total + more, what
        target, plain = parent / f"{kind} {dims} {dtype}", parent / f"{kind} {dtype}"
        save_both_ways(model, target)
        if not plain.exists():
            save_both_ways(from_pretrained(folder, dtype=dtype, **QUIET), plain)
        assert files_in(target / "at once") == files_in(plain / "at once"), what


def quantised_files_are_read_in_parts(parent):
    for kind, layouts, other in (("fp8 experts", PAIRS, None), ("mxfp4", PAIRS[1:], partial(gpt_oss, 4))):
        folder = parent / kind
        if dist.get_rank() == 0:
            make_quantized(kind, folder, other)
        dist.barrier()
        theirs = dequantized_by_transformers(kind, folder, torch.bfloat16)
        whole = dict.fromkeys(("model.embed_tokens", "lm_head"), "replicate")  # of 131 words
        for dims in layouts:
            sizes = {name: getattr(dims, name) for name in ("tp_size", "ep_size", "dp_replicate_size")}
            sizes["fsdp_size"] = dist.get_world_size() // dims.tp_size // dims.dp_replicate_size
            rules = {"tp_plan": whole} if dims.tp_size > 1 else {}
            model = from_pretrained(folder, distributed_config={**sizes, **rules}, **QUIET)
            for name, parameter in model.named_parameters():
                assert apart(parameter, theirs.get_parameter(name)) == 0.0, (kind, dims, name)


def resized(parent):
    """Other numbers of tokens, while loading and of a model that is divided: as on one axis, and trained alike."""
    folder = folder_of("llama", parent)
    said = refusal(partial(from_pretrained, folder, mesh=PAIRS[0], num_tokens=141, **QUIET))
    assert "cannot be divided by tp_size 2. Add rows: from_pretrained(…, pad_to_multiple_of=2)" in said
    found = []
    for dims in (ParallelDims(), PAIRS[0]):
        model = from_pretrained(folder, mesh=dims, **QUIET)
        if dims.tp_size == 2:
            said = refusal(partial(resize_token_embeddings, model, 141))
            assert "of 141 tokens cannot be divided by tp_size 2. Add rows: pad_to_multiple_of=2." in said
        resize_token_embeddings(model, 141, pad_to_multiple_of=2)
        ids = torch.arange(130, 142)[None]
        loss = model.train()(input_ids=ids, labels=ids).loss
        found.append((loss.detach(), model))
        while_loading = from_pretrained(folder, mesh=dims, num_tokens=141, pad_to_multiple_of=2, **QUIET)
        torch.testing.assert_close(while_loading.train()(input_ids=ids, labels=ids).loss, loss)
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, parameter in found[0][1].named_parameters():
        assert apart(found[1][1].get_parameter(name), full(parameter)) < 1e-6, name


def exported(parent):
    """A training state saved by ranks that share layers and experts is exported as the model itself is saved."""
    folder, sizes = folder_of("qwen3_moe", parent), {"tp_size": 2, "dp_shard_size": 1}
    plugin, config = FSDPPlugin(ep_size=2), ParallelismConfig(**sizes)
    accelerator = make_accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    model = from_pretrained(folder, accelerator=accelerator, **QUIET).train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = torch.arange(3, 15)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    state, saved, out = (parent / name for name in ("state", "saved", "out"))
    accelerator.save_state(state)
    save_pretrained(model, saved)
    export_checkpoint(state, out, config=folder)
    assert_same_tensors(stored_tensors(out), stored_tensors(saved))


def states_of_others(parent):
    """DCP states as torchtitan (FSDP2) writes them, and `save_pretrained(distributed_checkpoint=True)` of transformers,
    which puts fused gates in order for its own files alone, are read in parts of any layout."""
    from transformers.distributed import DistributedConfig

    folder, sources = folder_of("qwen3_moe", parent), [parent / "of torchtitan", parent / "of transformers"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    for module in (*model.model.layers, model):
        fully_shard(module)
    dcp.save({"model": model.state_dict()}, checkpoint_id=sources[0])
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    model.save_pretrained(sources[1], distributed_checkpoint=True)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for source in sources:
        for dims in (ParallelDims(), BOTH):
            model = from_pretrained(source, config=folder, mesh=dims, **QUIET)
            for name, parameter in model.named_parameters():
                assert apart(parameter.detach(), plain.get_parameter(name).detach()) == 0.0, (source, dims, name)


@pytest.mark.parametrize("layouts", [FOURS[4:5], pytest.param(FOURS, marks=pytest.mark.nightly)])
def test_four_ranks_read_and_write_their_parts(tmp_path, layouts):
    made = [("qwen3_moe", dims, torch.bfloat16) for dims in layouts]
    run_ranks(files_and_bytes_do_not_know_of_it, 4, made, tmp_path)


def test_two_ranks_read_and_write_their_parts(tmp_path):
    made = [("llama", TP, torch.float32), ("qwen3_moe", EP, torch.bfloat16)]
    cases = {"files and bytes": partial(files_and_bytes_do_not_know_of_it, made)}
    cases |= named(quantised_files_are_read_in_parts, resized, exported, states_of_others)
    run_ranks(run_cases, 2, cases, tmp_path)


# ---- who shares rows ----


def a_loader_that_does_not_know_of_it(parent: Path) -> None:
    """The two ranks of a layer would add their partial products of different rows, without a word."""
    folder = folder_of("llama", parent)
    accelerator = new_accelerator()
    for layout in ({"mesh": TP}, {"distributed_config": {"tp_size": 2}}):
        model = from_pretrained(folder, accelerator=accelerator, **layout, **QUIET)
        said = refusal(lambda model=model: accelerator.prepare(model, torch.optim.SGD(model.parameters())))
        assert "sharded with tp_size 2, so that 2 neighbouring process(es) need the same rows" in said
        assert "gives the same rows to 1" in said and "\n" not in said
    trainer = ShardedTrainer(model=model, args=arguments(parent / "out", max_steps=1), train_dataset=make_rows(8))
    assert "need the same rows" in refusal(trainer.train)


def draws_of_ranks_that_share_layers(parent: Path) -> None:
    """Each rank has a seed of its own: dropout and samples are those of the first rank of a group on all."""
    folder, ids = folder_of("llama", parent), torch.arange(3, 15)[None]
    model = from_pretrained(folder, mesh=TP, attention_dropout=0.5, **QUIET).train()
    torch.manual_seed(dist.get_rank())
    model(input_ids=ids, labels=ids).loss.backward()
    norm = model.model.norm.weight.grad.to_local()  # whole on both ranks, which have computed it apart
    assert len({str(each) for each in all_ranks(norm.tolist())}) == 1
    torch.manual_seed(dist.get_rank())
    texts = [model.eval().generate(ids, max_new_tokens=8, do_sample=True) for _ in range(2)]
    assert len({str(each) for each in all_ranks(texts[0].tolist())}) == 1 and not torch.equal(*texts)
    for dims in (TP, ParallelDims(cp_size=2)):
        model, rows = from_pretrained(folder, mesh=dims, **QUIET), ids + dist.get_rank()
        assert "have different rows" in refusal(lambda m=model, r=rows: m.generate(r, max_new_tokens=2))
        assert "have different rows" in refusal(lambda m=model, r=rows: m.train()(input_ids=r, labels=r))


def weights_that_have_drifted_apart(parent: Path) -> None:
    model = from_pretrained(folder_of("llama", parent), mesh=TP, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_pretrained(model, parent / "alike")
    if dist.get_rank() == 1:
        model.model.norm.weight.data.add_(1e-3)
    said = pytest.warns(UserWarning, match=r"1 weights .* differ: .*model\.norm\.weight")
    with said if dist.get_rank() == 0 else nullcontext():
        save_pretrained(model, parent / "drifted")


def trainers_that_count_completions(parent: Path) -> None:
    new_accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model = from_pretrained(folder_of("llama", parent), mesh=TP, **QUIET)
    options = {"parallelism_config": ParallelismConfig(tp_size=2), "fsdp": True}
    trainer = ShardedTrainer(model=model, args=arguments(parent / "grpo", **options), train_dataset=make_rows(8))
    trainer._calculate_rewards = None  # as GRPOTrainer and RLOOTrainer have it
    assert "counts the completions of each process for itself" in refusal(trainer.train)


def rules_beside_a_mesh(parent: Path) -> None:
    folder, names = folder_of("llama", parent), ("q_proj", "k_proj", "v_proj", "o_proj")
    rules = {"tp_plan": {f"model.layers.*.self_attn.{name}": "replicate" for name in names}}
    shared = new_accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    for given in ({"mesh": TP}, {"accelerator": shared}):
        model = from_pretrained(folder, distributed_config=rules, **given, **QUIET)
        block = model.model.layers[0]
        assert block.mlp.up_proj.weight.to_local().shape[0] * 2 == block.mlp.up_proj.weight.shape[0]
        assert block.self_attn.q_proj.weight.device_mesh.size() == 1, "whole on both ranks, by the rule"
    said = refusal(lambda: from_pretrained(folder, mesh=TP, distributed_config={"tp_size": 2, **rules}, **QUIET))
    assert "distributed_config gives tp_size, and mesh another layout" in said


def axes_by_their_names(parent: Path) -> None:
    folder = folder_of("llama", parent)
    for names in (("dp_shard", "ep"), ("data", "model"), ("dp_shard", "dp_replicate")):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        with pytest.raises(MeshError, match="does not say what each is for"):
            from_pretrained(folder, mesh=mesh, **QUIET)
    model = from_pretrained(folder, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp")), **QUIET)
    assert model.lm_head.weight.to_local().shape[0] * 2 == model.lm_head.weight.shape[0]


SHARED = {"cp": {"cp_size": 2}, "tp": {"tp_size": 2}}


def rates_and_rows_of_a_loop(sizes: dict[str, int], parent: Path) -> None:
    """The scheduler ends with the loader, each row is a metric's once, and the norm is that of the Accelerator."""
    accelerator = new_accelerator(parallelism_config=ParallelismConfig(**sizes))
    model = from_pretrained(folder_of("llama", parent), accelerator=accelerator, **QUIET).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    loader = torch.utils.data.DataLoader(range(7), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert len(loader) == 4
    rates, seen, named = [], [], []
    for batch in loader:
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        seen += accelerator.gather_for_metrics(batch).tolist()
        named += accelerator.gather_for_metrics([f"row {row}" for row in batch.tolist()])
    assert rates == [1.0, 0.75, 0.5, 0.25]
    assert seen == [*range(7)] and named == [f"row {row}" for row in range(7)]
    ids = torch.arange(3, 15)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1e9)
    assert norm > 0 and torch.equal(norm, accelerator.clip_grad_norm_(model.parameters(), 1e9))


def rows_of_a_trainer(sizes: dict[str, int], parent: Path) -> None:
    """Ranks that share rows count once among those of a step, from which a Trainer tells samples per second."""
    shared = ParallelismConfig(**sizes)
    model = from_pretrained(folder_of("llama", parent), accelerator=new_accelerator(parallelism_config=shared), **QUIET)
    args = arguments(parent / f"rows {sizes}", parallelism_config=shared, fsdp=True, per_device_train_batch_size=3)
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(8))
    assert trainer.get_total_train_batch_size(args) == 3


def averages_by_dcp(parent: Path) -> None:
    """Fused gates, which a layer's ranks hold in two ranges, are written in one layout and read in the other."""
    folder = folder_of("qwen3_moe", parent)
    models = {name: from_pretrained(folder, mesh=dims, **QUIET) for name, dims in (("one", None), ("two", TP))}
    for written, read in (("one", "two"), ("two", "one")):
        source, target = ParameterEMA(models[written]), ParameterEMA(models[read])
        for average in target._averages.values():
            average.zero_()
        dcp.save({"ema": source}, checkpoint_id=parent / written)
        dcp.load({"ema": target}, checkpoint_id=parent / written)
        expected = source.state_dict()
        for name, average in target.state_dict().items():
            assert torch.equal(full(average), full(expected[name])), (written, name)


def test_all_agree_on_who_shares_rows(tmp_path: Path) -> None:
    cases = named(
        a_loader_that_does_not_know_of_it, draws_of_ranks_that_share_layers, weights_that_have_drifted_apart,
        trainers_that_count_completions, rules_beside_a_mesh, axes_by_their_names, averages_by_dcp,
    )  # fmt: skip
    for name, sizes in SHARED.items():
        cases[f"loop, {name}"] = partial(rates_and_rows_of_a_loop, sizes)
        cases[f"trainer, {name}"] = partial(rows_of_a_trainer, sizes)
    run_ranks(run_cases, 2, cases, tmp_path)
