"""4-bit bases on real ranks: shards and scales bit for bit those of plain from_pretrained; QLoRA as on one process."""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    HybridFSDPPlugin,
    ParallelDims,
    describe_sharding,
    from_pretrained,
    load_weights,
    make_accelerator,
    resize_token_embeddings,
    save_pretrained,
)
from hf_fsdp_tools.loading.quantized import four_bits as packing
from hf_fsdp_tools.modeling.four_bits import beside_4bit, weights_4bit
from hf_fsdp_tools.sharding.added import shard_added
from tests._checkpoints import full_state, randomize
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, logged
from tests._training import train as run_steps

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")

STORAGES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


def four_bits(storage: torch.dtype = torch.bfloat16, **options: Any) -> BitsAndBytesConfig:
    given = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=storage, **(given | options))


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options})


def small_llama(folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Weights of 32 x 64 to 192 x 64 values, whose blocks three ranks cannot share evenly.

    Their rows are whole blocks: on CPUs bitsandbytes 0.50 dequantises others wrongly (off by 75 %).
    """
    config = hf.LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    randomize(hf.LlamaForCausalLM(config).to(dtype)).save_pretrained(folder, max_shard_size="30KB")
    return folder


def plain(folder: Path, config: BitsAndBytesConfig | None = None, **options: Any) -> PreTrainedModel:
    given = {} if config is None else {"quantization_config": config}
    model = AutoModelForCausalLM.from_pretrained(folder, **given, **options)
    for module in model.modules():  # an evaluation on some CPUs would leave rearranged weights behind
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


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


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Same names, dtypes, shapes and bytes."""
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key].dtype, ours[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (ours[key], tensor))), key


# ---- loading ----


def _load_all(folder: Path, kind: str) -> list[float]:
    ratios = []
    for storage in STORAGES if kind == "llama" else STORAGES[:1]:
        for quant_type in ("nf4", "fp4"):
            for nested in (True, False):
                dtype = torch.float32 if nested else torch.bfloat16
                given = {"bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": nested}
                model, report = from_pretrained(
                    folder,
                    dtype=dtype,
                    quantization_config=four_bits(storage, **given),
                    output_loading_info=True,
                    # small parts: a weight is packed in several, and the scales are joined in several rounds
                    load_kwargs={"staging_bytes": 2**20},
                )
                assert not report.missing_keys and not report.unexpected_keys
                assert_same(everything(model), everything_plain(folder, dtype, storage, given))
                packed = [model.get_parameter(f"{fqn}_packed") for fqn in weights_4bit(model)]
                assert all(isinstance(each, DTensor) and not each.requires_grad for each in packed)
                assert {each.dtype for each in packed} == {torch.uint8}, "whatever the dtype of storage"
                ratios.append(report.read_ratio)
    return ratios


def everything_plain(
    folder: Path, dtype: torch.dtype, storage: torch.dtype, given: dict[str, Any]
) -> dict[str, torch.Tensor]:
    return plain(folder, four_bits(storage, **given), dtype=dtype).state_dict()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.shows("reads its own bytes", "QLoRA")
def test_shards_and_scales_are_those_of_plain_from_pretrained(tmp_path, ranks):
    folder = small_llama(tmp_path / "llama")
    for ratios in run_ranks(_load_all, ranks, folder, "llama"):
        assert ratios == [1.0] * len(ratios), "no block is read by two ranks"


def test_transposed_weights_and_tied_heads(tmp_path):
    config = hf.GPT2Config(vocab_size=131, n_embd=64, n_inner=192, n_layer=2, n_head=4, n_positions=64)
    config.bos_token_id = config.eos_token_id = 1
    randomize(hf.GPT2LMHeadModel(config)).save_pretrained(tmp_path)
    run_ranks(_load_all, 2, tmp_path, "gpt2")


def _replicas(folder: Path) -> None:
    mesh = ParallelDims(dp_replicate_size=2).build_mesh("cpu")
    model = from_pretrained(folder, quantization_config=four_bits(), mesh=mesh, offload_policy=CPUOffloadPolicy())
    assert_same(everything(model), plain(folder, four_bits()).state_dict())


@pytest.mark.shows("QLoRA", "HSDP")
def test_replicas_hold_the_same(tmp_path):
    run_ranks(_replicas, 4, small_llama(tmp_path / "llama"))


def _stored(folder: Path, saved: Path, output: Path) -> None:
    model, report = from_pretrained(saved, output_loading_info=True)
    assert not report.missing_keys and not report.unexpected_keys
    expected = plain(saved).state_dict()
    assert_same(everything(model), expected)
    assert report.read_ratio == 1.0, "bytes of the shards and the scales, and no more"
    # on and on: what we save opens in either, and loading again into the same shards gives the same
    save_pretrained(model, output / "again", blocking=False)  # loading waits for it
    assert_same(everything(from_pretrained(output / "again")), expected)
    load_weights(model, saved)
    assert_same(everything(model), expected)
    fresh = from_pretrained(folder, quantization_config=four_bits(torch.float16), dtype=torch.bfloat16)
    save_pretrained(fresh, output / "fresh")
    load_weights(fresh, folder)
    assert_same(everything(fresh), everything(from_pretrained(output / "fresh")))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.shows("save_pretrained", "QLoRA")
def test_checkpoints_that_hold_4_bit_weights_are_read_and_written(tmp_path, nested):
    folder, saved = small_llama(tmp_path / "llama"), tmp_path / "saved"
    quantised = plain(folder, four_bits(bnb_4bit_use_double_quant=nested), dtype=torch.bfloat16)
    quantised.save_pretrained(saved)
    run_ranks(_stored, 2, folder, saved, tmp_path)
    files = [load_file(path) for path in sorted((tmp_path / "again").glob("*.safetensors"))]
    assert_same({key: tensor for file in files for key, tensor in file.items()}, load_file(saved / "model.safetensors"))
    assert_same(plain(tmp_path / "again").state_dict(), quantised.state_dict())
    assert_same(
        plain(tmp_path / "fresh").state_dict(),
        plain(folder, four_bits(torch.float16), dtype=torch.bfloat16).state_dict(),
    )


# ---- QLoRA ----


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 131, (6, 16), generator=generator) for _ in range(5)]


def train(model: Any, rank: int = 0, ranks: int = 1) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    mine = [ids.chunk(ranks)[rank] for ids in batches()]
    losses = torch.tensor(run_steps(model.train(), optimizer, [{"input_ids": ids, "labels": ids} for ids in mine]))
    if ranks > 1:
        dist.all_reduce(losses)
    return (losses / ranks).tolist()


def _qlora(folder: Path, output: Path, storage: torch.dtype) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = from_pretrained(folder, quantization_config=four_bits(storage), peft_config=lora())
    before = {key: tensor.clone() for key, tensor in everything(model.get_base_model()).items() if "lora" not in key}
    losses = train(model, rank, ranks)
    with torch.no_grad():
        model.eval()(input_ids=batches()[0])
    after = {key: tensor for key, tensor in everything(model.get_base_model()).items() if "lora" not in key}
    assert_same(after, before)
    save_pretrained(model, output)
    return losses


@pytest.mark.parametrize("storage", STORAGES[:2])
@pytest.mark.shows("losses of one process", "QLoRA")
def test_five_steps_of_qlora_equal_those_of_one_process(tmp_path, storage):
    folder = small_llama(tmp_path / "llama")
    torch.manual_seed(0)
    expected = get_peft_model(plain(folder, four_bits(storage)), lora())
    losses = train(expected)
    assert losses[-1] != losses[0]
    for ranks in (1, 2):
        for found in run_ranks(_qlora, ranks, folder, tmp_path / "adapter", storage):
            torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected.save_pretrained(tmp_path / "expected")
    theirs = load_file(tmp_path / "expected" / "adapter_model.safetensors")
    torch.testing.assert_close(saved, theirs, rtol=1e-3, atol=1e-4)
    reopened = PeftModel.from_pretrained(plain(folder, four_bits(storage)), tmp_path / "adapter")
    ids = batches()[0]
    torch.testing.assert_close(
        reopened.eval()(input_ids=ids).logits, expected.eval()(input_ids=ids).logits, rtol=1e-3, atol=1e-4
    )


def _grown(folder: Path) -> list[float]:
    """Rows for added tokens while loading and afterwards; then an adapter by PEFT's own call, in compiled blocks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = from_pretrained(folder, quantization_config=four_bits(), num_tokens=140, compile={"backend": "aot_eager"})
    expected = {key: tensor for key, tensor in plain(folder, four_bits()).state_dict().items() if ".layers." in key}
    assert_same({key: tensor for key, tensor in everything(model).items() if ".layers." in key}, expected)
    resize_token_embeddings(model, 150)
    assert model.lm_head.weight.shape == (150, 64)
    torch.manual_seed(0)
    adapted = get_peft_model(model, lora())
    shard_added(adapted)
    assert "float32 and nf4 in uint8" in describe_sharding(adapted)
    return train(adapted, rank, ranks)


@pytest.mark.shows("QLoRA", "compile")
def test_4_bit_models_grow_and_are_compiled(tmp_path):
    (alone,) = run_ranks(_grown, 1, small_llama(tmp_path / "llama"))
    for losses in run_ranks(_grown, 2, tmp_path / "llama"):
        torch.testing.assert_close(losses, alone, rtol=1e-5, atol=0)


def _under_the_trainer(folder: Path, output: Path) -> list[float]:
    """bf16, activations recomputed, the adapter read again; without an adapter, transformers refuses."""
    args = arguments(output, max_steps=3, learning_rate=5e-5, bf16=True, save_strategy="steps", save_steps=2)
    accelerator = make_accelerator(
        mixed_precision="bf16", cpu=True, fsdp_plugin=HybridFSDPPlugin(activation_checkpointing=True)
    )
    config = four_bits(bnb_4bit_compute_dtype=torch.bfloat16)
    data = [{"input_ids": row, "labels": row} for ids in batches() for row in ids]
    base = from_pretrained(folder, accelerator=accelerator, quantization_config=config)
    assert {p.dtype for p in base.parameters()} == {torch.bfloat16, torch.uint8}, "frozen: no fp32 masters"
    with pytest.raises(ValueError, match="purely quantized"):
        ShardedTrainer(model=base, args=args, train_dataset=data)
    model = from_pretrained(folder, accelerator=accelerator, quantization_config=config, peft_config=lora())
    trainer = ShardedTrainer(model=model, args=args, train_dataset=data)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    losses = logged(trainer)
    assert losses and all(0 < loss < 10 for loss in losses)
    return losses


@pytest.mark.shows("activation checkpointing", "bf16", "QLoRA")
def test_qlora_under_the_trainer(tmp_path):
    first, second = run_ranks(
        _under_the_trainer, 2, small_llama(tmp_path / "llama", dtype=torch.bfloat16), tmp_path / "run"
    )
    assert first == second


# ---- refusals and faults ----


def another_dtype(folder: Path, output: Path) -> None:
    model = from_pretrained(folder, quantization_config=four_bits())
    with pytest.raises(ConfigError, match=r"dtype=torch\.float32 cannot be honoured.*quantised"):
        load_weights(model, folder, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"dtype=torch\.float32 cannot be honoured.*quantised"):
        save_pretrained(model, output, dtype=torch.float32)
    before = everything(model)
    adapted = get_peft_model(prepare_model_for_kbit_training(model), lora())  # casts what is not packed
    shard_added(adapted)
    after = {key.replace("base_layer.", ""): tensor for key, tensor in everything(model).items()}
    assert_same({key: tensor for key, tensor in after.items() if key in before}, before)


def dora(folder: Path, output: Path) -> None:
    with pytest.raises(ConfigError, match=r"DoRA takes norms over whole rows"):
        from_pretrained(folder, quantization_config=four_bits(), peft_config=lora(use_dora=True))


def a_merged_adapter(folder: Path, output: Path) -> None:
    adapted = from_pretrained(folder, quantization_config=four_bits(), peft_config=lora())
    with pytest.raises(ConfigError, match=r"merged into 4-bit weights.*load_adapter"):
        save_pretrained(adapted, output, merge_adapters=True)


REFUSALS = (another_dtype, dora, a_merged_adapter)


def test_what_cannot_be_had_is_refused_with_the_reason(tmp_path):
    run_ranks(run_cases, 2, REFUSALS, small_llama(tmp_path / "llama"), tmp_path / "out")


def _fails_on_one_rank(folder: Path) -> str:
    model = from_pretrained(folder, quantization_config=four_bits())
    broken = Mock(side_effect=CheckpointError("the disk is on fire"))
    on_rank_1 = patch.object(packing, "_places_of", broken if dist.get_rank() == 1 else packing._places_of)
    with on_rank_1, pytest.raises(CheckpointError) as failure:
        load_weights(model, folder)
    assert model(torch.arange(3, 9).view(1, 6)).logits.isnan().all(), "nothing to compute with"
    return str(failure.value)


def test_a_rank_that_cannot_read_stops_all(tmp_path):
    messages = run_ranks(_fails_on_one_rank, 3, small_llama(tmp_path / "llama"))
    assert (
        len(set(messages)) == 1
        and "failed on 1 of 3 ranks" in messages[0]
        and "rank 1: the disk is on fire" in messages[0]
    )


def _opens(folder: Path) -> str:
    with pytest.raises(CheckpointError) as failure:
        from_pretrained(folder)
    return str(failure.value)


DAMAGE = {
    "no scales": (
        lambda t: [t.pop(key) for key in list(t) if key.endswith("absmax")],
        r"q_proj\.weight\.absmax': expected uint8 .* of a packed weight, found nothing",
    ),
    "plain values": (
        lambda t: [t.update({key: torch.randn(64, 64)}) for key in list(t) if key.endswith("q_proj.weight")],
        r"q_proj\.weight': expected bfloat16 \[1024, 1\] of a packed weight, found float32 \[64, 64\]",
    ),
    "nothing": (
        lambda t: [t.pop(key) for key in list(t) if "k_proj.weight" in key],
        r"k_proj\.weight' is not in the checkpoint",
    ),
}


def _damage(saved: Path, kind: str) -> Path:
    change, _ = DAMAGE[kind]
    folder = Path(shutil.copytree(saved, saved.parent / kind))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_damaged_4_bit_checkpoints(tmp_path):
    saved = tmp_path / "saved"
    plain(small_llama(tmp_path / "llama"), four_bits(), dtype=torch.bfloat16).save_pretrained(saved)
    cases = {kind: partial(_opens, _damage(saved, kind)) for kind in DAMAGE}
    first, second = run_ranks(run_cases, 2, cases)
    assert first == second
    for kind, (_, message) in DAMAGE.items():
        assert re.search(message, first[kind]), first[kind]
