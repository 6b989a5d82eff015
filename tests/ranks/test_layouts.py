"""What works on one axis works where ranks share layers and experts: saves, quantised files, bytes that are read."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import (
    FSDPPlugin,
    ParallelDims,
    export_checkpoint,
    from_pretrained,
    make_accelerator,
    resize_token_embeddings,
    save_pretrained,
)
from tests._checkpoints import (
    assert_same_tensors,
    dequantized_by_transformers,
    full,
    gpt_oss,
    make_quantized,
    refusal,
    stored_tensors,
)
from tests._dist import run_cases, run_ranks
from tests.api import all_ranks, local_tensor, patched
from tests.ranks.test_background_saves import files_in, save_both_ways
from tests.ranks.test_parallel import FOURS, PAIRS, apart, folder_of

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 has it")

QUIET = {"progress": False}
BOTH = FOURS[1]  # layers and experts are shared


def files_and_bytes_do_not_know_of_it(combinations, parent):
    """Each rank reads its part and, beside gaps of up to a page, no byte more; what plans leave whole is read by each
    rank of a layer. Saved at once and in the background: the files of one axis, and the tensors of one process."""
    for kind, dims, dtype in combinations:
        what, folder = (kind, dims, dtype), folder_of(kind, parent)
        with patched(MAX_GAP_BYTES=0):
            model, report = from_pretrained(folder, mesh=dims, dtype=dtype, load_kwargs=QUIET, output_loading_info=True)
        is_reader = dist.get_rank() < dist.get_world_size() // dims.dp_replicate_size
        held = 4 * sum(local_tensor(parameter).numel() for parameter in model.parameters())  # files hold fp32
        assert report.share_bytes == held and report.bytes_read == (held if is_reader else 0), what
        whole = [p for p in model.parameters() if p.device_mesh.size() * dims.tp_size == dist.get_world_size()]
        more = (dims.tp_size - 1) * sum(p.numel() * 4 for p in whole)
        total = sum(p.numel() * 4 for p in model.parameters())
        assert sum(all_ranks(report.bytes_read)) == total + more, what
        target, plain = parent / f"{kind} {dims} {dtype}", parent / f"{kind} {dtype}"
        save_both_ways(model, target)
        if not plain.exists():
            save_both_ways(from_pretrained(folder, dtype=dtype, load_kwargs=QUIET), plain)
        assert files_in(target / "at once") == files_in(plain / "at once"), what


def quantised_files_are_read_in_parts(kinds, parent):
    for kind, layouts, other in kinds:
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
            model = from_pretrained(folder, distributed_config={**sizes, **rules}, load_kwargs=QUIET)
            for name, parameter in model.named_parameters():
                assert apart(parameter, theirs.get_parameter(name)) == 0.0, (kind, dims, name)


def resized(kinds, parent):
    """Other numbers of tokens, while loading and of a model that is divided: as on one axis, and trained alike."""
    for kind in kinds:
        folder = folder_of(kind, parent)
        said = refusal(partial(from_pretrained, folder, mesh=PAIRS[0], num_tokens=141, load_kwargs=QUIET))
        assert "cannot be divided by tp_size 2. Add rows: from_pretrained(…, pad_to_multiple_of=2)" in said
        found = []
        for dims in (ParallelDims(), PAIRS[0]):
            model = from_pretrained(folder, mesh=dims, load_kwargs=QUIET)
            if dims.tp_size == 2:
                said = refusal(partial(resize_token_embeddings, model, 141))
                assert "of 141 tokens cannot be divided by tp_size 2. Add rows: pad_to_multiple_of=2." in said
            resize_token_embeddings(model, 141, pad_to_multiple_of=2)
            ids = torch.arange(130, 142)[None]
            loss = model.train()(input_ids=ids, labels=ids).loss
            found.append((loss.detach(), model))
            while_loading = from_pretrained(folder, mesh=dims, num_tokens=141, pad_to_multiple_of=2, load_kwargs=QUIET)
            torch.testing.assert_close(while_loading.train()(input_ids=ids, labels=ids).loss, loss)
        torch.testing.assert_close(found[0][0], found[1][0])
        for name, parameter in found[0][1].named_parameters():
            assert apart(found[1][1].get_parameter(name), full(parameter)) < 1e-6, name


def exported(parent):
    """A training state saved by ranks that share layers and experts is exported as the model itself is saved."""
    folder, sizes = folder_of("qwen3_moe", parent), {"tp_size": 2, "dp_shard_size": 1}
    plugin, config = FSDPPlugin(ep_size=2), ParallelismConfig(**sizes)
    accelerator = make_accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    model = from_pretrained(folder, accelerator=accelerator, load_kwargs=QUIET).train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = torch.arange(3, 15)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    state, saved, out = (parent / name for name in ("state", "saved", "out"))
    accelerator.save_state(state)
    save_pretrained(model, saved)
    export_checkpoint(state, out, config=folder)
    assert_same_tensors(stored_tensors(out), stored_tensors(saved))


NATIVE = {
    "llama": {"tp_size": 2},
    "qwen3_moe": {"tp_size": 2},  # whose fused gates transformers puts in order for its own files alone
    "mixtral": {"ep_size": 2, "fsdp_size": 2},
}


def states_of_others(kinds, parent):
    """DCP states as torchtitan (FSDP2) and transformers (its own layouts) write them, and what transformers' own
    `save_pretrained(distributed_checkpoint=True)` leaves, are read in parts of any layout."""
    from transformers.distributed import DistributedConfig

    for kind in kinds:
        folder = folder_of("qwen3_moe" if kind == "torchtitan" else kind, parent)
        sources = [parent / f"{kind} of others"]
        if kind == "torchtitan":
            model = AutoModelForCausalLM.from_pretrained(folder)
            for module in (*model.model.layers, model):
                fully_shard(module)
        else:
            config = DistributedConfig(**NATIVE[kind])
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
            sources.append(parent / f"{kind} of transformers")
            model.save_pretrained(sources[1], distributed_checkpoint=True)
        if kind == "qwen3_moe":
            del sources[0]
        else:
            dcp.save({"model": model.state_dict()}, checkpoint_id=sources[0])
        plain = AutoModelForCausalLM.from_pretrained(folder)
        for source in sources:
            layouts = [ParallelDims(), BOTH] if kind == "torchtitan" else [PAIRS[kind != "llama"]]
            for dims in layouts:
                model = from_pretrained(source, config=folder, mesh=dims, load_kwargs=QUIET)
                for name, parameter in model.named_parameters():
                    assert apart(parameter.detach(), plain.get_parameter(name).detach()) == 0.0, (source, dims, name)


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("layouts", [FOURS[4:5], pytest.param(FOURS, marks=pytest.mark.nightly)])
def test_four_ranks_read_and_write_their_parts(tmp_path, layouts):
    made = [("qwen3_moe", dims, torch.bfloat16) for dims in layouts]
    run_ranks(files_and_bytes_do_not_know_of_it, 4, made, tmp_path)


TWO_RANKS = {
    "files and bytes": partial(
        files_and_bytes_do_not_know_of_it, [("llama", PAIRS[0], DTYPES[0]), ("qwen3_moe", PAIRS[1], DTYPES[1])]
    ),
    "quantised": partial(
        quantised_files_are_read_in_parts, [("fp8 experts", PAIRS, None), ("mxfp4", PAIRS[1:], partial(gpt_oss, 4))]
    ),
    "resized": partial(resized, ("llama",)),
    "exported": exported,
    "states of others": partial(states_of_others, ("torchtitan", "qwen3_moe")),
}
RARE_TWO_RANKS = {
    "quantised": partial(quantised_files_are_read_in_parts, [("fp8", PAIRS[:1], None)]),
    "resized, tied": partial(resized, ("qwen3",)),
    "states of others": partial(states_of_others, ("llama", "mixtral")),
}


@pytest.mark.parametrize("cases", [TWO_RANKS, pytest.param(RARE_TWO_RANKS, marks=pytest.mark.nightly)])
def test_two_ranks(tmp_path, cases):
    run_ranks(run_cases, 2, cases, tmp_path)
