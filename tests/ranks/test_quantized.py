"""4-bit bases on real ranks: shards and scales bit for bit those of plain from_pretrained; QLoRA as on one process."""

from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    add_adapter,
    describe_sharding,
    from_pretrained,
    resize_token_embeddings,
    save_pretrained,
)
from hf_fsdp_tools.steps import load_weights
from tests._checkpoints import (
    assert_same_tensors,
    four_bits,
    full_state,
    randomize,
    refusal,
    small_llama,
    stored_tensors,
)
from tests._dist import named, run_cases, run_ranks
from tests._rounding import assert_near, with_rounding
from tests._training import new_accelerator
from tests._training import train as run_steps
from tests.api import ShardedScaler, beside_4bit, weights_4bit

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options})


def plain(folder: Path, config: BitsAndBytesConfig | None = None, **options: Any) -> PreTrainedModel:
    given = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(folder, **given, **options)


def everything(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The whole state dict as bitsandbytes would give it."""
    found = full_state(model)
    for fqn, form in weights_4bit(model).items():
        for name, part in form.parts(fqn).items():
            stored = found.pop(name)
            if not part.is_whole:
                dtype, shape = part.look(stored.shape)
                found[part.key(fqn)] = stored.view(dtype).reshape(shape)
    return found | beside_4bit(model)


EVERY = [*product((torch.uint8, torch.bfloat16, torch.float16, torch.float32), ("nf4", "fp4"), (True, False))]
FAST = [(torch.uint8, "nf4", True), (torch.float32, "fp4", False)]


def loaded(folder: Path, combinations: list[tuple[torch.dtype, str, bool]]) -> None:
    is_transposed = folder.name == "gpt2"
    for storage, quant_type, nested in combinations:
        dtype = torch.float32 if nested else torch.bfloat16
        config = four_bits(storage, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=nested)
        # small parts: a weight is packed in several, and the scales are joined in several rounds
        options = {"output_loading_info": True, "load_kwargs": {"staging_bytes": 2**20}}
        model, report = from_pretrained(folder, dtype=dtype, quantization_config=config, **options)
        assert not report.missing_keys and not report.unexpected_keys
        assert_same_tensors(everything(model), plain(folder, config, dtype=dtype).state_dict())
        packed = [model.get_parameter(f"{fqn}_packed") for fqn in weights_4bit(model)]
        assert all(isinstance(each, DTensor) and not each.requires_grad for each in packed)
        assert {each.dtype for each in packed} == {torch.uint8}, "whatever the dtype of storage"
        assert is_transposed or report.read_ratio == 1.0, "no block is read by two ranks"


@pytest.mark.parametrize(("ranks", "combinations"), [(3, FAST), pytest.param(2, EVERY, marks=pytest.mark.nightly)])
def test_shards_and_scales_are_those_of_plain_from_pretrained(tmp_path, ranks, combinations):
    """The same holds for a transposed weight and a tied head."""
    config = GPT2Config(vocab_size=131, n_embd=64, n_inner=192, n_layer=2, n_head=4, n_positions=64)
    config.bos_token_id = config.eos_token_id = 1
    randomize(GPT2LMHeadModel(config)).save_pretrained(tmp_path / "gpt2")
    cases = {
        "llama": partial(loaded, small_llama(tmp_path / "llama"), combinations),
        "gpt2": partial(loaded, tmp_path / "gpt2", combinations[:1]),
    }
    run_ranks(run_cases, ranks, cases)


def stored(folder: Path, saved: Path, output: Path) -> None:
    model, report = from_pretrained(saved, output_loading_info=True)
    assert not report.missing_keys and not report.unexpected_keys
    expected = plain(saved).state_dict()
    assert_same_tensors(everything(model), expected)
    assert report.read_ratio == 1.0, "bytes of the shards and the scales, and no more"
    # on and on: what we save opens in either, and loading again into the same shards gives the same
    save_pretrained(model, output / "again", blocking=False)  # loading waits for it
    assert_same_tensors(everything(from_pretrained(output / "again")), expected)
    load_weights(model, saved)
    assert_same_tensors(everything(model), expected)
    fresh = from_pretrained(folder, quantization_config=four_bits(torch.float16), dtype=torch.bfloat16)
    save_pretrained(fresh, output / "fresh")
    load_weights(fresh, folder)
    assert_same_tensors(everything(fresh), everything(from_pretrained(output / "fresh")))


def test_checkpoints_that_hold_4_bit_weights_are_read_and_written(tmp_path):
    folder, saved = small_llama(tmp_path / "llama"), tmp_path / "saved"
    quantised = plain(folder, four_bits(bnb_4bit_use_double_quant=False), dtype=torch.bfloat16)
    quantised.save_pretrained(saved)
    run_ranks(stored, 2, folder, saved, tmp_path)
    assert_same_tensors(stored_tensors(tmp_path / "again"), load_file(saved / "model.safetensors"))
    assert_same_tensors(plain(tmp_path / "again").state_dict(), quantised.state_dict())
    fresh = plain(folder, four_bits(torch.float16), dtype=torch.bfloat16)
    assert_same_tensors(plain(tmp_path / "fresh").state_dict(), fresh.state_dict())


# ---- QLoRA ----


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 131, (6, 16), generator=generator) for _ in range(2)]


def train(model: Any, rank: int = 0, ranks: int = 1) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    mine = [ids.chunk(ranks)[rank] for ids in batches()]
    losses = torch.tensor(run_steps(model.train(), optimizer, [{"input_ids": ids, "labels": ids} for ids in mine]))
    if ranks > 1:
        dist.all_reduce(losses)
    return (losses / ranks).tolist()


def grown(compile: Any, folder: Path, output: Path) -> list[float]:
    """Rows for added tokens while loading and afterwards; then an adapter by PEFT's own call."""
    model = from_pretrained(folder, quantization_config=four_bits(), num_tokens=140, compile=compile)
    states = everything(model), plain(folder, four_bits()).state_dict()
    assert_same_tensors(*({key: t for key, t in state.items() if ".layers." in key} for state in states))
    resize_token_embeddings(model, 150)
    assert model.lm_head.weight.shape == (150, 64)
    torch.manual_seed(0)
    adapted = add_adapter(model, lora())
    assert "float32 and nf4 in uint8" in describe_sharding(adapted)
    return train(adapted, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("compile", [None, pytest.param({"backend": "aot_eager"}, marks=pytest.mark.nightly)])
def test_steps_of_qlora_with_added_tokens_equal_those_of_one_process(tmp_path, compile):
    folder = small_llama(tmp_path / "llama")
    (alone,) = run_ranks(grown, 1, compile, folder, tmp_path)
    cases = {"grown": partial(grown, compile)} | named(*FAULTS)
    for found in run_ranks(run_cases, 2, cases, folder, tmp_path):
        torch.testing.assert_close(found["grown"], alone, rtol=1e-5, atol=0)


def in_fp16(folder: Path, dtype: torch.dtype, **options: Any) -> tuple[Any, torch.optim.Optimizer, list[Any]]:
    """A base that is computed in that dtype, SGD, which a gradient of another scale would throw away, and batches."""
    torch.manual_seed(0)
    four = four_bits(bnb_4bit_compute_dtype=dtype)
    model = from_pretrained(folder, quantization_config=four, peft_config=lora(), **options).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}, "gradients that can be unscaled"
    mine = [ids.chunk(dist.get_world_size())[dist.get_rank()] for ids in batches() * 3]
    return model, torch.optim.SGD(trained, lr=0.2), [{"input_ids": ids, "labels": ids} for ids in mine]


def scaled(folder: Path) -> list[float]:
    """The losses with an Accelerator in fp16: on a GPU, or with the scaler that it has there."""
    accelerator = new_accelerator(mixed_precision="fp16")
    if accelerator.device.type == "cpu":
        accelerator.scaler, accelerator.native_amp = ShardedScaler("cpu"), True
    model, optimizer, rows = in_fp16(folder, torch.float16, accelerator=accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = run_steps(model, optimizer, rows, accelerator=accelerator)
    assert accelerator.scaler.get_scale() == 2.0**16, "no step was left out"
    return losses


def scaled_by_hand(dtype: torch.dtype, folder: Path) -> list[float]:
    """The same in one process, under autocast for fp16."""
    model, optimizer, rows = in_fp16(folder, dtype)
    losses = []
    for batch in rows:
        with torch.autocast(model.device.type, torch.float16, enabled=dtype == torch.float16):
            loss = model(**batch).loss
        (loss * 2.0**16).backward()
        for each in optimizer.param_groups[0]["params"]:
            each.grad /= 2.0**16
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_steps_of_qlora_in_fp16_equal_those_of_one_process(tmp_path):
    folder = small_llama(tmp_path / "llama")
    by_hand = (partial(scaled_by_hand, dtype, folder) for dtype in (torch.float16, torch.float32))
    ((losses, allowed),) = run_ranks(with_rounding, 1, *by_hand)
    assert losses[0] - losses[-1] > 10 * max(allowed), "the run learns, so a wrong gradient would show"
    for ranks in (1, 2):
        for found in run_ranks(scaled, ranks, folder):
            assert_near(found, losses, allowed)


# ---- refusals and faults ----


def another_dtype(folder: Path, output: Path) -> None:
    model = from_pretrained(folder, quantization_config=four_bits(), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.uint8}, "frozen: no fp32 masters"
    with pytest.raises(ConfigError, match=r"dtype=torch\.float32 cannot be honoured.*quantised"):
        load_weights(model, folder, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"dtype=torch\.float32 cannot be honoured.*quantised"):
        save_pretrained(model, output, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"DoRA takes norms over whole rows"):
        from_pretrained(folder, quantization_config=four_bits(), peft_config=lora(use_dora=True))
    before = everything(model)
    adapted = add_adapter(prepare_model_for_kbit_training(model), lora())  # casts what is not packed
    after = {key.replace("base_layer.", ""): tensor for key, tensor in everything(model).items()}
    assert_same_tensors({key: tensor for key, tensor in after.items() if key in before}, before)
    with pytest.raises(ConfigError, match=r"this base is quantised as stored.*hf-fsdp export"):
        save_pretrained(adapted, output, merge_adapters=True)


def a_rank_that_cannot_read_stops_all(folder: Path, output: Path) -> None:
    model = from_pretrained(folder, quantization_config=four_bits())
    with patch("os.preadv", side_effect=OSError(5, "on fire")) if dist.get_rank() == 1 else nullcontext():
        said = refusal(lambda: load_weights(model, folder), CheckpointError)
    assert model(torch.arange(3, 9).view(1, 6)).logits.isnan().all(), "nothing to compute with"
    assert "failed on 1 of 2 ranks" in said and "on fire" in said


DAMAGE: dict[str, tuple[str, Any]] = {  # of each such tensor: what is there in its place
    "q_proj.weight.absmax': expected uint8 ": ("q_proj.weight.absmax", None),
    "q_proj.weight': expected bfloat16 [1024, 1] of a packed weight, found float32 [64, 64]": (
        "q_proj.weight",
        torch.zeros(64, 64),
    ),
    "nested_absmax holds values that are not finite": ("nested_absmax", torch.tensor([torch.nan])),
    "RecursionError: ": ("quant_state.bitsandbytes__nf4", torch.tensor(list(b"[" * 10**5), dtype=torch.uint8)),
    "k_proj.weight' is not in the checkpoint": ("k_proj.weight", None),
}


def damaged(folder: Path, output: Path) -> None:
    for number, (message, (name, instead)) in enumerate(DAMAGE.items()):
        target = output / str(number)
        if dist.get_rank() == 0:
            plain(folder, four_bits(), dtype=torch.bfloat16).save_pretrained(target)
            tensors = load_file(target / "model.safetensors")
            for key in [key for key in tensors if name in key and (instead is None or key.endswith(name))]:
                del tensors[key]
                tensors |= {} if instead is None else {key: instead.clone()}
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()
        said = refusal(partial(from_pretrained, target), CheckpointError)
        assert message in said, said


FAULTS = (another_dtype, a_rank_that_cannot_read_stops_all, damaged)
