"""Ranks that share rows compute what one process does on whole rows: losses, gradients, a step, evaluation, outputs."""

from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ParallelDims, make_wrap_plan, shard_model
from tests._checkpoints import full, tiny_config
from tests._dist import run_cases, run_ranks

KINDS = {  # with what attention is beside full causal attention
    "llama": "",
    "gemma3_text": "sliding windows",
    "gpt_oss": "sinks and windows",
    "qwen3_moe": "experts, and a loss that balances them",
    "deepseek_v3": "latent attention (MLA)",
    "cohere2": "layers without rotary angles",
    "gemma2": "soft caps",
    "llama4_text": "chunks",
}
OPTIONS = {"qwen3_moe": {"output_router_logits": True, "router_aux_loss_coef": 0.5}}
LENGTH = 21  # which neither 2 nor 4 divides


@cache
def plain(kind: str) -> Any:
    """A model in which every parameter matters, without randomness."""
    config = tiny_config(kind)
    config.update(OPTIONS.get(kind, {}))
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if kind == "gpt_oss" else None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def rows_of(kind: str, replica: int) -> dict[str, torch.Tensor]:
    """A batch for the ranks of a group: right padding, packed documents, labels that are left out."""
    generator = torch.Generator().manual_seed(replica)
    ids = torch.randint(3, 60, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, : 4 + replica] = -100
    rows = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        documents = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])
        return rows | {"position_ids": documents.expand(2, -1).contiguous()}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[1, 15:] = 0
        labels[1, 15:] = -100
        return rows | {"attention_mask": mask}
    return rows


def sharded_copy(kind: str, dims: ParallelDims, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_config(
        plain(kind).config, attn_implementation=plain(kind).config._attn_implementation
    )
    model.load_state_dict(plain(kind).state_dict())
    return shard_model(model, make_wrap_plan(model), mesh=dims.build_mesh("cpu"), **options)


def rows_are_shared(kinds, cp_size, replicate=1, checkpointing=False):
    """Loss, gradients, evaluation and outputs without labels, for whole, packed and padded rows."""
    dims = ParallelDims(cp_size=cp_size, dp_replicate_size=replicate)
    replicas = dist.get_world_size() // cp_size
    own = dist.get_rank() // cp_size
    for kind in kinds:
        model = sharded_copy(kind, dims, activation_checkpointing=checkpointing)
        for rows in ("whole", "packed", "padded"):
            one = plain(kind).train()
            one.zero_grad()
            losses = [one(**rows_of(rows, replica), use_cache=False).loss for replica in range(replicas)]
            (sum(losses) / replicas).backward()
            model.train().zero_grad()
            loss = model(**rows_of(rows, own)).loss
            loss.backward()
            what = f"{kind}, {rows} rows, {dims}"
            torch.testing.assert_close(loss.detach(), losses[own].detach(), msg=lambda text, w=what: f"{w}: {text}")
            expected = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and name in expected:
                    torch.testing.assert_close(
                        full(parameter.grad),
                        expected[name],
                        rtol=1e-4,
                        atol=1e-6,
                        msg=lambda text, w=f"{what}, {name}": f"{w}: {text}",
                    )
            with torch.no_grad():
                batch = rows_of(rows, own)
                torch.testing.assert_close(model.eval()(**batch).loss, one.eval()(**batch, use_cache=False).loss)
                del batch["labels"]
                torch.testing.assert_close(
                    model(**batch).logits, one(**batch, use_cache=False).logits, rtol=1e-4, atol=1e-5
                )


def test_ranks_that_share_rows_compute_what_one_process_does():
    cases = {
        "two share, two batches": partial(rows_are_shared, tuple(KINDS), 2),
        "four share": partial(rows_are_shared, ("llama",), 4),
        "replicated shards": partial(rows_are_shared, ("llama", "qwen3_moe"), 2, 2),
        "recomputed": partial(rows_are_shared, ("llama", "gemma3_text"), 2, 1, True),
    }
    run_ranks(run_cases, 4, cases)
