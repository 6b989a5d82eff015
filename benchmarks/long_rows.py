"""One row of many tokens on CPU ranks that share it, beside one process: losses of steps, weights, memory.

    python -m benchmarks.long_rows                          # 131,072 tokens, one document and 40; 1, 2 and 4 ranks
    python -m benchmarks.long_rows --tokens 4096 --ranks 2

The model is tiny: one block of 4 heads, which attend by torch's sdpa without a mask. One process runs transformers' own
model, documents one by one. Memory is how much the resident set of a rank grows, at most, beyond that before the steps.
"""

import argparse
import resource
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import ParallelDims
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from hf_fsdp_tools.testing import run_ranks

RATE = 0.5
"""Of SGD, so that weights differ where gradients do."""


def make_model(tokens: int) -> Any:
    """Weights are those of a seed."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": tokens}
    return LlamaForCausalLM(LlamaConfig(**sizes)).train()


def row_of(step: int, tokens: int, documents: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Ids, labels and lengths of documents, none of which predicts the first word of the next."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 64, (1, tokens), generator=generator)
    cuts = torch.randperm(tokens - 1, generator=generator)[: documents - 1].add(1).sort().values.tolist()
    lengths = [last - first for first, last in zip([0, *cuts], [*cuts, tokens], strict=True)]
    labels = ids.clone()
    labels[0, [0, *cuts]] = -100
    return ids, labels, lengths


def loss_by_documents(model: Any, ids: torch.Tensor, labels: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The mean over all documents, each of which runs alone; gradients are added up."""
    count, loss = (labels != -100).sum(), torch.zeros(())
    for words, own in zip(ids.split(lengths, 1), labels.split(lengths, 1), strict=True):
        part = model(input_ids=words, labels=own, num_items_in_batch=count, use_cache=False).loss
        if words.shape[1] > 1:
            part.backward()
            loss += part.detach()
    return loss


def trained(tokens: int, documents: int, steps: int, ranks: int) -> dict[str, Any]:
    """What a rank of so many computes; one rank is the plain model in one process."""
    model = make_model(tokens)
    if ranks > 1:
        mesh = ParallelDims(cp_size=ranks).build_mesh("cpu")
        shard_model(model, make_wrap_plan(model), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    before, start, losses = _resident(), time.monotonic(), []
    for step in range(steps):
        ids, labels, lengths = row_of(step, tokens, documents)
        if ranks == 1:
            losses.append(float(loss_by_documents(model, ids, labels, lengths)))
        else:
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            loss = model(input_ids=ids, labels=labels, position_ids=positions, use_cache=False).loss
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.monotonic() - start
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}
    return {"losses": losses, "weights": whole, "bytes": _resident() - before, "seconds": seconds}


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compared(tokens: int, documents: int, steps: int, ranks: list[int]) -> list[dict[str, Any]]:
    """A row for each number of ranks: losses, how far these and the weights are from one process, memory, seconds."""
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for number in [1, *(each for each in ranks if each > 1)]:
        found = run_ranks(trained, number, tokens, documents, steps, number, timeout_s=7200, fresh=True)
        first = first or found[0]
        apart = max(abs(a - b) / abs(b) for a, b in zip(found[0]["losses"], first["losses"], strict=True))
        pairs = ((found[0]["weights"][name], each) for name, each in first["weights"].items())
        weights = max(float((own - each).norm() / each.norm()) for own, each in pairs)
        most = max(each["bytes"] for each in found)
        row = {"ranks": number, "losses": found[0]["losses"], "loss apart": apart, "weights apart": weights}
        rows.append(row | {"MB": most / 1e6, "seconds": found[0]["seconds"]})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 40])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    for documents in given.documents:
        print(f"{given.tokens:,} tokens, {documents} documents, {given.steps} steps")
        print("| ranks | losses | losses apart | weights apart | MB of a rank | seconds |\n|---|---|---|---|---|---|")
        for row in compared(given.tokens, documents, given.steps, given.ranks):
            losses = " ".join(f"{each:.6f}" for each in row["losses"])
            print(
                f"| {row['ranks']} | {losses} | {row['loss apart']:.1e} | {row['weights apart']:.1e} | {row['MB']:.0f} "
                f"| {row['seconds']:.0f} |",
                flush=True,
            )
