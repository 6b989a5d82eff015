"""What works on one axis works where ranks share layers and experts: saves, quantised files, bytes that are read."""

from contextlib import nullcontext
from functools import partial
from itertools import chain
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import (
    ParallelDims,
    export_checkpoint,
    from_pretrained,
    make_accelerator,
    resize_token_embeddings,
    save_pretrained,
)
from tests._checkpoints import dequantized_by_transformers, full, gpt_oss, make_quantized, refusal
from tests._dist import run_cases, run_ranks
from tests._grids import fast_and_nightly
from tests._rounding import assert_near, with_rounding
from tests._training import ShardedTrainer, arguments, full_gradients, logged, make_rows
from tests.api import all_ranks, choices, local_tensor, patched
from tests.ranks.test_parallel import FOURS, PAIRS, REPLICAS, apart, folder_of, prepared, rows
from tests.ranks.test_save import files_in, save_both_ways

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 has it")

QUIET = {"progress": False}
BOTH = FOURS[1]  # layers and experts are shared
LORA = {"peft_config": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}}


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
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
        again = AutoModelForCausalLM.from_pretrained(target / "at once").state_dict()
        assert all(torch.equal(again[key], tensor) for key, tensor in theirs.items()), what


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
            loss.backward()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()
            found.append((loss.detach(), model))
            while_loading = from_pretrained(folder, mesh=dims, num_tokens=141, pad_to_multiple_of=2, load_kwargs=QUIET)
            torch.testing.assert_close(while_loading.train()(input_ids=ids, labels=ids).loss.detach(), loss.detach())
        torch.testing.assert_close(found[0][0], found[1][0])
        for name, parameter in found[0][1].named_parameters():
            assert apart(found[1][1].get_parameter(name), full(parameter)) < 1e-6, name


def in_bf16(ways, parent):
    """Loss and gradients in bf16 (fp32 masters), as on one axis with the same rows, and the same experts, on each
    rank."""

    def passed(model, batch, given=None):
        model.zero_grad()
        with choices(model, {name: name for name, _ in model.named_modules()}, given) as made:
            loss = model(**batch).loss
        loss.backward()
        assert loss.dtype == torch.float32
        return {} if given else made.once(), {"loss": loss.item(), **full_gradients(model)}

    for kind, dims, options in ways:
        seeded = {"load_kwargs": QUIET | {"seed": 1}, "mp_policy": "bf16", **options}
        folder = folder_of(kind, parent)
        alone, model = (from_pretrained(folder, mesh=each, **seeded).train() for each in (ParallelDims(), dims))
        mine = rows(dims, 0)[1]
        batch = {"input_ids": mine, "labels": mine, "use_cache": False}
        chosen, _ = passed(alone, batch)
        expected, allowed = with_rounding(partial(passed, alone, batch, chosen))
        assert_near(passed(model, batch, chosen)[1], expected[1], allowed[1], f"{kind} {options}")


def exported(dims, parent):
    """A training state saved by ranks that share layers or experts is exported as the model itself is saved."""
    folder = folder_of("qwen3_moe", parent)
    sizes = {name: getattr(dims, name) for name in ("tp_size", "dp_replicate_size")}
    sizes["dp_shard_size"] = dist.get_world_size() // dims.tp_size // dims.dp_replicate_size
    accelerator, model, optimizer = prepared(parent, sizes, dims.ep_size)
    ids = torch.arange(3, 15)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    state, saved, out = (parent / f"{name} {dims}" for name in ("state", "saved", "out"))
    accelerator.save_state(state)
    save_pretrained(model, saved)
    export_checkpoint(state, out, config=folder)
    assert files_in(out).keys() == files_in(saved).keys()
    found, expected = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (out, saved))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), dims


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


def one_rank_that_cannot_read_stops_all(parent):
    folder = folder_of("qwen3_moe", parent)
    for dims in PAIRS:
        broken = patch("os.preadv", side_effect=OSError(5, "Input/output error"))
        with broken if dist.get_rank() == 1 else nullcontext():
            said = refusal(partial(from_pretrained, folder, mesh=dims, load_kwargs=QUIET))
        assert "Input/output error" in said, said


class Noisy(ShardedTrainer):
    """Random draws are a part of its loss."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * (1 + self.noise * torch.rand(())) if torch.is_tensor(loss) else loss  # with outputs: evaluation


def in_a_trainer(parent, sizes, ep_size, noise, out, former=None):
    """Loss, norm and rate of two steps on four rows each; then the evaluation's loss."""
    folder = folder_of("qwen3_moe", parent)
    config = ParallelismConfig(**sizes) if sizes else None
    args = arguments(
        parent / out,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        lr_scheduler_type="linear",
        per_device_train_batch_size=4 * (config.tp_size if config else 1) // dist.get_world_size(),
        parallelism_config=config,
        fsdp=True,
        fsdp_config={"ep_size": ep_size},
    )
    model = from_pretrained(folder, accelerator=make_accelerator(args), load_kwargs=QUIET)
    trainer = Noisy(model=model, args=args, train_dataset=make_rows(32), eval_dataset=make_rows(16))
    trainer.noise = noise
    trainer.train(resume_from_checkpoint=former and str(parent / former / "checkpoint-1"))
    steps = zip(*(logged(trainer, name) for name in ("loss", "grad_norm", "learning_rate")), strict=True)
    return [*chain.from_iterable(steps), trainer.evaluate()["eval_loss"]]


def test_a_trainer_resumes_in_another_layout(tmp_path):
    """Losses, norms and rates go on, and what is evaluated is the same."""
    cases = {
        "first": partial(in_a_trainer, tmp_path, {"tp_size": 2}, 1, 0.0, "first"),
        "two": partial(in_a_trainer, tmp_path, {}, 2, 0.0, "two", "first"),
    }
    found = run_ranks(run_cases, 2, cases)[0]
    assert found["two"][3:] == pytest.approx(found["first"][3:], rel=1e-4)


@pytest.mark.nightly
def test_a_trainer_resumes_in_its_layout_bit_for_bit_and_on_one_rank(tmp_path):
    """Random draws go on, too."""
    tp = partial(in_a_trainer, tmp_path, {"tp_size": 2}, 1)
    cases = {"noisy": partial(tp, 0.1, "noisy"), "again": partial(tp, 0.1, "again", "noisy")}
    found = run_ranks(run_cases, 2, {**cases, "first": partial(tp, 0.0, "first")})[0]
    found["one"] = run_ranks(in_a_trainer, 1, tmp_path, {}, 1, 0.0, "one", "first")[0]
    assert found["again"][3:] == found["noisy"][3:]
    assert found["one"][3:] == pytest.approx(found["first"][3:], rel=1e-4)


DTYPES = [torch.float32, torch.bfloat16]


@fast_and_nightly(lambda kinds, dtypes: [(kinds[4], dtypes[1])], [("qwen3_moe", dims) for dims in FOURS], DTYPES)
def test_four_ranks_read_and_write_their_parts(tmp_path, combinations):
    made = [(*kind, dtype) for kind, dtype in combinations]
    run_ranks(files_and_bytes_do_not_know_of_it, 4, made, tmp_path)


@pytest.mark.nightly
def test_four_ranks(tmp_path):
    cases = {
        "exported": partial(exported, ParallelDims(dp_replicate_size=2, ep_size=2)),
        "exported, tp and ep": partial(exported, BOTH),
        "generation": partial(("llama",), [REPLICAS]),
        "bf16": partial(in_bf16, [("llama", REPLICAS, {}), ("llama", REPLICAS, LORA)]),
        "quantised": partial(quantised_files_are_read_in_parts, [("fp8 experts", (BOTH, FOURS[5]), None)]),
    }
    run_ranks(run_cases, 4, cases, tmp_path)


TWO_RANKS = {
    "files and bytes": partial(
        files_and_bytes_do_not_know_of_it, [("llama", PAIRS[0], DTYPES[0]), ("qwen3_moe", PAIRS[1], DTYPES[1])]
    ),
    "quantised": partial(
        quantised_files_are_read_in_parts, [("fp8 experts", PAIRS, None), ("mxfp4", PAIRS[1:], partial(gpt_oss, 4))]
    ),
    "resized": partial(resized, ("llama",)),
    "bf16": partial(in_bf16, [("llama", PAIRS[0], {})]),
    "states of others": partial(states_of_others, ("torchtitan", "qwen3_moe")),
    "one rank": one_rank_that_cannot_read_stops_all,
    "exported": partial(exported, BOTH),
}
RARE_TWO_RANKS = {
    "files and bytes": partial(files_and_bytes_do_not_know_of_it, [("llama", PAIRS[0], DTYPES[1])]),
    "quantised": partial(quantised_files_are_read_in_parts, [("fp8", PAIRS[:1], None)]),
    "resized, tied": partial(resized, ("qwen3",)),
    "bf16": partial(in_bf16, [("qwen3_moe", PAIRS[1], {})]),
    "states of others": partial(states_of_others, ("llama", "mixtral")),
    **{f"exported, {dims}": partial(exported, dims) for dims in PAIRS},
}


@pytest.mark.parametrize("cases", [TWO_RANKS, pytest.param(RARE_TWO_RANKS, marks=pytest.mark.nightly)])
def test_two_ranks(tmp_path, cases):
    run_ranks(run_cases, 2, cases, tmp_path)
