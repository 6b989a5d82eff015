"""One rank that holds a model whole on its device has a plain model, and computes no more than a plain loop."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from hf_fsdp_tools import from_pretrained, unsharded
from tests._checkpoints import lora

BF16 = {"mp_policy": "bf16"}
IDS = torch.randint(3, 131, (2, 12), generator=torch.Generator().manual_seed(0))


def loaded(folder: Path, **options: Any) -> Any:
    return from_pretrained(folder, load_kwargs={"progress": False, "seed": 1}, **options).train()


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32 masters": BF16,
    "bf16 alone": {"dtype": "bf16"},
    "LoRA": BF16 | {"dtype": "bf16", "peft_config": lora()},
}


def test_a_loss_may_read_the_head_after_a_pass_of_the_base_alone(folders: dict[str, Path]) -> None:
    """As TRL's chunked losses for GRPO do; a pass whose loss is never made leaves no old copy behind."""
    model, expected = (loaded(folders["tied"], **BF16) for _ in range(2))
    head = model.lm_head.weight
    for step in range(2):
        model.model(IDS)
        assert model.lm_head.weight.dtype == torch.bfloat16
        for each in (model, expected):
            hidden = each.model(IDS).last_hidden_state if each is model else None
            logits = hidden @ each.lm_head.weight.t() if each is model else each(IDS).logits
            logits.float().square().sum().backward()
            each.zero_grad() if step else None
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.add_(0.01)
    assert model.lm_head.weight is head and torch.equal(head, expected.lm_head.weight)
    model.model(IDS)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert model.lm_head.weight is head


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators_of(run: Callable[[], Any]) -> Counter[str]:
    run()
    with Operators() as seen:
        run()
    return seen.count


def step(model: Any, optimizer: torch.optim.Optimizer, *, autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_no_more_operators_than_a_plain_loop(case: str, folders: dict[str, Path]) -> None:
    from peft import get_peft_model

    options, folder = CASES[case], folders["llama"]
    plain: Any = LlamaForCausalLM.from_pretrained(folder, dtype="bfloat16" if "dtype" in options else "float32")
    if "peft_config" in options:
        plain = get_peft_model(plain, options["peft_config"])
    counts = []
    for model, autocast in ((loaded(folder, **options), False), (plain.train(), "mp_policy" in options)):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        counts.append(operators_of(partial(step, model, optimizer, autocast=autocast)))
    ours, theirs = counts
    copies = "aten._to_copy.default"
    assert ours[copies] <= theirs[copies], (ours - theirs, theirs - ours)
    assert ours.total() <= theirs.total(), (ours - theirs, theirs - ours)


def test_weights_are_cast_once_for_a_text(folders: dict[str, Path]) -> None:
    model = loaded(folders["llama"], **BF16).eval()
    casts = []
    for gathered in (True, False):  # as it decides itself, and unit by unit
        with nullcontext() if gathered else unsharded(model, False):
            text = partial(model.generate, IDS, max_new_tokens=5, min_new_tokens=5)
            casts.append(operators_of(text)["aten._to_copy.default"])
    assert casts[1] - casts[0] == 4 * sum(1 for _ in model.parameters())
    with unsharded(model):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
