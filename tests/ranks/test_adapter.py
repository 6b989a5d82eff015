"""A LoRA adapter trained under FSDP2 opens in plain PEFT with all rows of every rank, and holds no base weight."""

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_fsdp_tools import FSDPTrainerMixin, make_accelerator
from tests._checkpoints import make_checkpoint
from tests._dist import run_ranks

IDS = torch.arange(3, 19).reshape(1, 16)


class ShardedTrainer(FSDPTrainerMixin, Trainer):
    pass


def _adapted(folder) -> PeftModel:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder)
    # rank 3 over 2 processes: shards of 2 rows and 1 row
    config = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def _train_and_save(folder, output):
    args = TrainingArguments(
        str(output),
        max_steps=4,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    make_accelerator(cpu=True)
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 64
    trainer = ShardedTrainer(model=_adapted(folder), args=args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    dist.barrier()
    trainer.model.eval()
    with torch.no_grad():
        return trainer.model(input_ids=IDS).logits


def test_the_adapter_of_all_ranks_opens_in_plain_peft(tmp_path):
    base = make_checkpoint("llama", tmp_path / "base")
    logits = run_ranks(_train_and_save, 2, base, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in stored} == {"lora_A", "lora_B", "lm_head"}
    assert stored["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (3, 48)
    plain = AutoModelForCausalLM.from_pretrained(base)
    untrained = plain(input_ids=IDS).logits
    with torch.no_grad():
        reopened = PeftModel.from_pretrained(plain, tmp_path / "out")(input_ids=IDS).logits
    for sharded in logits:
        torch.testing.assert_close(reopened, sharded, rtol=1e-4, atol=1e-5)
    assert (reopened - untrained).abs().max() > 0.1, "it was trained"
