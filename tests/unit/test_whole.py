"""One rank that holds a model whole on its device has a plain model, with the numbers of FSDP2's units.

FSDP2's units on one rank are those of a model whose shards are "offloaded" from the CPU to the CPU.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from hf_fsdp_tools import from_pretrained, unsharded
from tests._checkpoints import full, lora, make_checkpoint, small_llama

BF16 = {"mp_policy": "bf16"}
EAGER = {"experts_implementation": "eager"}
STACKS: dict[str, Any] = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
IDS = torch.randint(3, 131, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    parent = tmp_path_factory.mktemp("models")

    def made(kind: str) -> Path:
        folder = parent / kind
        if folder.exists():
            return folder
        return small_llama(folder) if kind == "even" else make_checkpoint(kind, folder)

    return made


def loaded(folder: Path, **options: Any) -> Any:
    return from_pretrained(folder, load_kwargs={"progress": False, "seed": 1}, **options).train()


def trained(model: Any) -> list[torch.Tensor]:
    """Losses, gradients and weights of two steps, the first with two micro-batches."""
    torch.manual_seed(0)  # of dropout
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found = []
    for count in (2, 1):
        for batch in range(count):
            ids = IDS.roll(batch)
            words = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
            loss = model(input_ids=ids, labels=ids, **words).loss
            loss.backward()
            found.append(loss.detach())
        found += [full(p.grad) for p in trained if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(full, model.parameters())]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("llama", {}),
    "fp32 masters": ("llama", BF16),
    "tied": ("tied", BF16),
    "bf16 alone": ("llama", {"dtype": "bf16"}),
    "a router in fp32": ("deepseek_v3", BF16 | EAGER),
    "recomputed": ("llama", BF16 | {"activation_checkpointing": True}),
    "compiled": ("llama", BF16 | {"compile": "aot_eager"}),
    "LoRA": ("llama", BF16 | {"dtype": "bf16", "peft_config": lora()}),
    "LoRA of stacks, on fp32": ("qwen3_moe", BF16 | EAGER | {"peft_config": lora(target_modules=[], **STACKS)}),
    "trained copies": ("tied", BF16 | {"dtype": "bf16", "peft_config": lora(modules_to_save=["embed_tokens"])}),
    "4 bits": ("even", BF16 | {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "peft_config": lora()}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_whole_model_trains_as_units_do_bit_for_bit(case: str, checkpoint: Callable[[str], Path]) -> None:
    kind, options = CASES[case]
    whole, units = (loaded(checkpoint(kind), **options, **more) for more in ({}, {"offload_policy": True}))
    assert any(isinstance(module, FSDPModule) for module in units.modules())
    assert not any(isinstance(module, FSDPModule) for module in whole.modules())
    assert not any(isinstance(each, DTensor) for each in (*whole.parameters(), *whole.buffers()))
    for found, expected in zip(trained(whole), trained(units), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert not any(p.grad is not None and isinstance(p.grad, DTensor) for p in whole.parameters())


def test_masters_are_back_after_errors_and_between_passes(checkpoint: Callable[[str], Path]) -> None:
    model = loaded(checkpoint("llama"), **BF16)
    masters = dict(model.named_parameters())

    def fail(module: nn.Module, args: object) -> None:
        assert module.weight.dtype == torch.bfloat16  # in the middle of a pass
        raise RuntimeError("no")

    handle = model.model.layers[1].mlp.up_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        model(IDS)
    handle.remove()
    assert dict(model.named_parameters()) == masters
    model(IDS).logits.float().sum().backward()
    assert dict(model.named_parameters()) == masters and all(p.grad is not None for p in masters.values())


def test_a_loss_may_read_the_head_after_a_pass_of_the_base_alone(checkpoint: Callable[[str], Path]) -> None:
    """As TRL's chunked losses for GRPO do; a pass whose loss is never made leaves no old copy behind."""
    model, expected = (loaded(checkpoint("tied"), **BF16) for _ in range(2))
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
    """Counts operators."""

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


@pytest.mark.parametrize("case", ["fp32", "bf16 alone", "LoRA", "fp32 masters"])
def test_a_step_has_no_more_operators_than_a_plain_loop(case: str, checkpoint: Callable[[str], Path]) -> None:
    from peft import get_peft_model

    _, options = CASES[case]
    folder = checkpoint("llama")
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


def test_weights_are_cast_once_for_a_text(checkpoint: Callable[[str], Path]) -> None:
    model = loaded(checkpoint("llama"), **BF16).eval()
    casts = []
    for gathered in (True, False):  # as it decides itself, and unit by unit
        with nullcontext() if gathered else unsharded(model, False):
            text = partial(model.generate, IDS, max_new_tokens=5, min_new_tokens=5)
            casts.append(operators_of(text)["aten._to_copy.default"])
    assert casts[1] - casts[0] == 4 * sum(1 for _ in model.parameters())
    with unsharded(model):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
