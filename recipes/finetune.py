"""Fine-tune any causal language model under FSDP2, from its checkpoint to a normal Hugging Face checkpoint.

Quick start, nothing to download (a small Llama made on the spot, trained on CPython's own documentation):

    hf-fsdp config --output here.yaml
    accelerate launch --config_file here.yaml recipes/finetune.py

A real one; every option of TRL's SFTConfig works (`--help` lists them):

    accelerate launch --config_file accelerate_configs/fsdp2_gpu_8_bf16.yaml recipes/finetune.py \
        --model_name_or_path Qwen/Qwen3-8B --dataset_name trl-lib/Capybara --learning_rate 1e-5 --max_length 4096

LoRA: `--use_peft --lora_target_modules all-linear --lora_r 16` (TRL's options; the base stays in its stored dtype). The
adapter is saved; `--merge_adapters` writes a checkpoint that needs no PEFT. QLoRA: `--load_in_4bit` besides
(bitsandbytes; `--bnb_4bit_quant_type`, `--use_bnb_nested_quant`), a quarter of the bytes of a bf16 base.

`--dataset_name` is a hub name, a folder, or a .jsonl/.json/.csv/.parquet/.txt file with a column `text`, `messages`, or
`prompt` and `completion`. Quick start on 2 CPU cores: evaluation loss falls from about 7.6 to below 4.5 in two minutes.
"""

import atexit
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import datasets
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProgressCallback, set_seed
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    FSDPToolsError,
    FSDPTrainerMixin,
    describe_sharding,
    from_pretrained,
    make_accelerator,
    make_demo_model,
    save_pretrained,
)
from hf_fsdp_tools.cli.demo import write_demo_dataset

QUICK_START = {
    "num_train_epochs": 6,
    "per_device_train_batch_size": 2,
    "learning_rate": 2e-3,
    "max_length": 192,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
}
"""Settings for the demo model where the command line gives none: measured to fit into 3 minutes on 2 CPU cores."""

FORMATS = ({"text"}, {"messages"}, {"prompt", "completion"})


@dataclass
class ModelArguments(ModelConfig):
    """What is fine-tuned: TRL's own options."""

    merge_adapters: bool = field(
        default=False, metadata={"help": "Write a checkpoint with the adapter merged in, beside the adapter (merged/)."}
    )


class Trainer(FSDPTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer on our shards."""


class Progress(ProgressCallback):
    """The Trainer's progress bar with loss and tokens/s behind it, instead of a line for each log."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.last = (time.perf_counter(), 0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None or "loss" not in (logs or {}):
            return
        now, tokens = time.perf_counter(), int(logs.get("num_tokens", 0))
        speed = (tokens - self.last[1]) / (now - self.last[0])
        self.last = (now, tokens)
        self.training_bar.set_postfix_str(f"loss {float(logs['loss']):.3f}, {speed:,.0f} tokens/s")


def main() -> None:
    script, training, model_args = parse_arguments()
    accelerator = make_accelerator(mixed_precision=training.mixed_precision, cpu=training.use_cpu)
    say = accelerator.print

    # 1. What is trained on what
    if model_args.model_name_or_path is None:
        say("Quick start: a small Llama and its text, made on the spot (give --model_name_or_path for a real one)")
        datasets.disable_progress_bars()  # seven bars for seven short moments
        model_args.model_name_or_path, script.dataset_name = make_demo(accelerator, Path(training.output_dir, "_demo"))
    train, evaluation = load_splits(script, training)
    tokenizer = load_tokenizer(model_args, training)

    # 2. The model, straight into shards; with an adapter, if one is asked for
    model, report = from_pretrained(
        model_args.model_name_or_path,
        accelerator=accelerator,
        peft_config=get_peft_config(model_args),
        dtype=getattr(torch, model_args.dtype) if model_args.dtype not in (None, "auto") else None,
        trust_remote_code=training.trust_remote_code,
        revision=model_args.model_revision,
        load_kwargs={"seed": training.seed},
        output_loading_info=True,
        **({"attn_implementation": model_args.attn_implementation} if model_args.attn_implementation else {}),
        **four_bits(model_args, accelerator.mixed_precision),
    )
    say(f"\n{describe_sharding(model)}\n\n{report}\n")

    # 3. Train, with the evaluation loss before and after
    trainer = Trainer(
        model=model, args=training, train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Progress)
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]

    # 4. A normal Hugging Face checkpoint, and a look at it
    trainer.save_model()
    if model_args.merge_adapters:
        save_pretrained(trainer.model, Path(training.output_dir, "merged"), tokenizer=tokenizer, merge_adapters=True)
    sample = generate(trainer.model, tokenizer, prompt_of(evaluation, tokenizer), seed=training.seed)
    say(f"\nevaluation loss  {before:.3f} before, {after:.3f} after")
    say(f"checkpoint       {training.output_dir} (open it with AutoModelForCausalLM.from_pretrained)")
    say(f"sample           {sample!r}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def parse_arguments() -> tuple[ScriptArguments, SFTConfig, ModelArguments]:
    parser = TrlParser((ScriptArguments, SFTConfig, ModelArguments))
    # The launch config decides precision, device and activation checkpointing. The last checkpoint is always written.
    checkpointing = next(
        name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(SFTConfig, name)
    )
    parser.set_defaults(
        output_dir="outputs/finetune", bf16=False, use_cpu=not torch.accelerator.is_available(), save_strategy="no",
        logging_steps=5, report_to="none", dtype=None, **{checkpointing: False},
    )  # fmt: skip
    script, training, model_args = parser.parse_args_and_config()
    if model_args.model_name_or_path is None:  # neither on the command line nor in the file of --config
        parser.set_defaults(**QUICK_START)
        script, training, model_args = parser.parse_args_and_config()
    if model_args.load_in_8bit:
        raise ConfigError(
            "--load_in_8bit: 8-bit layers of bitsandbytes cannot be sharded. Use --load_in_4bit, or neither."
        )
    if model_args.load_in_4bit and not model_args.use_peft:
        raise ConfigError(
            "--load_in_4bit freezes the base, so there is nothing to train without an adapter: add --use_peft."
        )
    if model_args.load_in_4bit and model_args.merge_adapters:
        raise ConfigError(
            "--merge_adapters would round merged weights to 4 bits. Merge into the plain base afterwards."
        )
    if model_args.merge_adapters and not model_args.use_peft:
        raise ConfigError("--merge_adapters needs an adapter: add --use_peft.")
    if model_args.model_name_or_path is not None and script.dataset_name is None:
        raise ConfigError("--model_name_or_path needs --dataset_name: a hub name, a folder, or a .jsonl file.")
    return script, training, model_args


def four_bits(model_args: ModelArguments, mixed_precision: str) -> dict[str, Any]:
    """TRL's options for 4-bit weights, with computation in the dtype of mixed precision."""
    if not model_args.load_in_4bit:
        return {}
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(mixed_precision, "float32")
    return {"quantization_config": get_quantization_config(replace(model_args, dtype=dtype))}


def make_demo(accelerator: Accelerator, folder: Path) -> tuple[str, str]:
    """Rank 0 of each node writes the demo model and its text, the others wait for it; an upload leaves out `_…`."""
    if accelerator.is_local_main_process:
        make_demo_model(folder / "model")
        write_demo_dataset(folder / "data")
    accelerator.wait_for_everyone()
    return str(folder / "model"), str(folder / "data")


def load_tokenizer(model_args: ModelArguments, training: SFTConfig) -> PreTrainedTokenizerBase:
    name = model_args.model_name_or_path
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=training.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"No model or no tokenizer at {name!r}: {str(error).splitlines()[0]}") from error


def load_splits(script: ScriptArguments, training: SFTConfig) -> tuple[Dataset, Dataset]:
    """The training and evaluation split; a twentieth is held out where the dataset has only one."""
    path = Path(script.dataset_name)
    kinds = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
    try:
        if path.is_file():
            splits = load_dataset(kinds.get(path.suffix, "text"), data_files=str(path))
        else:
            splits = load_dataset(script.dataset_name, name=script.dataset_config)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"Cannot load the dataset {script.dataset_name!r}: {str(error).splitlines()[0]}") from error
    if script.dataset_train_split not in splits:
        raise ConfigError(
            f"{script.dataset_name!r} has no split {script.dataset_train_split!r}, only {', '.join(splits)}. "
            "Name one with --dataset_train_split."
        )
    train = splits[script.dataset_train_split]
    check_columns(train, script, training)
    evaluation = splits.get(script.dataset_test_split)
    if evaluation is None:
        halves: DatasetDict = train.train_test_split(test_size=0.05, seed=training.seed)
        train, evaluation = halves["train"], halves["test"]
    return train, evaluation


def check_columns(dataset: Dataset, script: ScriptArguments, training: SFTConfig) -> None:
    columns = set(dataset.column_names)
    if training.dataset_text_field in columns or any(wanted <= columns for wanted in FORMATS):
        return
    raise ConfigError(
        f"{script.dataset_name!r} has the columns {', '.join(sorted(columns))}; none can be trained on. Needed: "
        "`text`, `messages`, or `prompt` and `completion`. Rename one, or name a text column with "
        "--dataset_text_field."
    )


def prompt_of(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> str:
    """The beginning of the first evaluation example, as the model saw such text in training."""
    example = dataset[0]
    if "messages" in example:
        return tokenizer.apply_chat_template(example["messages"][:1], tokenize=False, add_generation_prompt=True)
    if isinstance(example.get("prompt"), list):
        return tokenizer.apply_chat_template(example["prompt"], tokenize=False, add_generation_prompt=True)
    text = example.get("prompt") or next(value for value in example.values() if isinstance(value, str))
    return " ".join(text.split()[:12])


def generate(model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, *, seed: int) -> str:
    """Continue a prompt with the sharded model: every rank calls, and draws the same tokens."""
    model.eval()
    set_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(next(model.parameters()).device)
    tokens = model.generate(**inputs, max_new_tokens=48, do_sample=True, temperature=0.7, use_cache=True)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def leave() -> NoReturn:
    """End a run that succeeded without tearing the interpreter down. Threads of gloo and Arrow may still ask for it
    then, and now and then that aborts the process with "terminate called without an active exception" (pytorch issues
    190489 and 179291, arrow issue 45017), so that the launcher reports a failure after hours of good work."""
    atexit._run_exitfuncs()  # trackers write their last lines here
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
        leave()
    except FSDPToolsError as error:  # the same on every rank, so one of each node says it
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"finetune: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
