r"""Fine-tune any causal language model under FSDP2, from its checkpoint to a normal Hugging Face checkpoint.

On data made on the spot, with a small Llama: nothing to download, 2 minutes on 2 CPU cores, 0.7 GB for each process;
the evaluation loss falls from 7.6 to below 4.5:

    python recipes/finetune.py                                                         # one process
    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/finetune.py    # two

A real model: Llama-3.1-8B at 4,096 tokens. The figures are predicted (`hf-fsdp estimate`) for rows of full length, as
--packing true makes them of chats; they stand with the reason of each setting at the top of the launch config, and
`hf-fsdp config MODEL` writes one for another model or machine.

    accelerate launch --config_file accelerate_configs/8x80gb.yaml recipes/finetune.py \
        --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name trl-lib/Capybara --max_length 4096 \
        --per_device_train_batch_size 1 --gradient_accumulation_steps 8
                          # one node of 8 H100: 69 GB and 7,100 tokens/s for each, 4.6 s for a step of 262,144 tokens
    accelerate launch --config_file accelerate_configs/2x8x80gb.yaml --machine_rank 0 --main_process_ip ADDRESS … \
        --per_device_train_batch_size 2 --gradient_accumulation_steps 2
                          # two nodes (machine_rank 1 on the other): 70 GB and 7,400 tokens/s for each, 2.2 s a step
    accelerate launch --config_file accelerate_configs/1x80gb.yaml recipes/finetune.py … --use_peft \
        --lora_target_modules all-linear --per_device_train_batch_size 2 --gradient_accumulation_steps 32
                          # LoRA on one H100: 69 GB and 9,200 tokens/s

Every option of TRL's SFTConfig works (`--help`), also from a YAML file (`--config run.yaml`), with these besides:

    LoRA        --use_peft --lora_target_modules all-linear; the base stays in its stored dtype. --merge_adapters writes
                a checkpoint that needs no PEFT besides. QLoRA: --load_in_4bit (bitsandbytes)
    data        --dataset_name: hub names, folders, .jsonl/.json/.csv/.parquet/.txt, several with commas between them;
                text, messages, prompt and completion, alpaca, ShareGPT; --dataset_streaming --max_steps N
    chats       --assistant_only_loss, --chat_template_path; of prompt and completion the completion alone counts
    speed       --packing (rows behind each other, kept apart: flash attention, or sdpa with a mask); --torch_compile
                (each block by itself). The loss never holds all logits (TRL's fused head)
    evaluation  a twentieth is held out; --eval_strategy no, --early_stopping_patience 3
    resuming    --resume_from_checkpoint true, or a path; ten checkpoints are written in a run, and two kept
    reports     --report_to tensorboard, wandb, …; trainer_state.json and loss.png in the output folder; --push_to_hub
"""

from itertools import takewhile

import datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import ScriptArguments, SFTConfig, SFTTrainer

from hf_fsdp_tools import FSDPTrainerMixin, make_accelerator
from hf_fsdp_tools.scripting import (
    ModelArguments,
    StreamMixin,
    check_before_loading,
    finish,
    load_model,
    load_splits,
    load_tokenizer,
    make_demo,
    opener,
    parse_arguments,
    run,
    show_losses,
    train,
)

DEMO = {
    "num_train_epochs": 6,
    "per_device_train_batch_size": 2,
    "learning_rate": 2e-3,
    "max_length": 192,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
}
"""Settings for the demo model where the command line gives none: measured to fit into 3 minutes on 2 CPU cores."""


class Trainer(StreamMixin, FSDPTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer on our shards."""


def main() -> None:
    # 1. What is trained on what
    script, training, model_args = parse_arguments(
        ScriptArguments, SFTConfig, ModelArguments, defaults={"output_dir": "outputs/finetune"}, demo=DEMO
    )
    accelerator = make_accelerator(training)
    if model_args.model_name_or_path is None:
        model_args.model_name_or_path, script.dataset_name = make_demo(accelerator, "text")
    columns = [{training.dataset_text_field}, {"messages"}, {"prompt", "completion"}]
    data, held_out = load_splits(script, training, columns=columns)
    tokenizer = load_tokenizer(model_args, training)

    # 2. What would fail later
    check_before_loading(model_args, training, tokenizer, data, held_out)

    # 3. The model, straight into shards; with an adapter, if one is asked for
    model = load_model(model_args, training, accelerator)

    # 4. Train, with the evaluation loss before and after
    trainer = Trainer(model=model, args=training, train_dataset=data, eval_dataset=held_out, processing_class=tokenizer)
    before, after = train(trainer, training, model_args)

    # 5. A normal Hugging Face checkpoint, and a look at it
    says = {
        "evaluation loss": show_losses(before, after),
        "checkpoint": f"{training.output_dir} (open it with {opener(trainer.model)}.from_pretrained)",
        "sample": lambda: repr(generate(trainer.model, tokenizer, prompt_of(data, tokenizer), seed=training.seed)),
    }
    finish(trainer, training, model_args, tokenizer, says=says)


def prompt_of(dataset: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> str:
    """The beginning of the first training example, as the model saw it in training."""
    example = next(iter(dataset))
    if "messages" in example:
        asked = list(takewhile(lambda turn: turn["role"] != "assistant", example["messages"]))
        return tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    if isinstance(example.get("prompt"), list):
        return tokenizer.apply_chat_template(example["prompt"], tokenize=False, add_generation_prompt=True)
    text = example.get("prompt") or next(value for value in example.values() if isinstance(value, str))
    return " ".join(text.split()[:12])


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, *, seed: int) -> str:
    """Continue a prompt with the sharded model: every rank calls, and generates until all have finished."""
    model.eval()
    set_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(next(model.parameters()).device)
    tokens = model.generate(**inputs, max_new_tokens=48, do_sample=True, temperature=0.7, use_cache=True)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


if __name__ == "__main__":
    run(main, "finetune")
