"""Align a causal language model with preferences (DPO) under FSDP2, from its checkpoint to a normal Hugging Face one.

Nothing to download: a small Llama learns to prefer passages of CPython's own documentation to the same words shuffled.
On two CPU processes the evaluation loss falls from 0.693, no preference, to below 0.5 in two minutes.

Shards of the reference in bf16 add 2 GB to each of eight GPUs for 8B parameters, with LoRA nothing; estimates do not
count its forward pass, a third of the time. `--precompute_ref_log_probs` runs it once before, and frees it. Rows have
`prompt`, `chosen` and `rejected`, text or turns of a chat; without `prompt`, both answers begin with it.
"""

import datasets
from trl import DPOConfig, DPOTrainer, ScriptArguments, get_peft_config

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, scripting


class Trainer(FSDPTrainerMixin, DPOTrainer):
    """TRL's DPOTrainer on our shards."""


def main() -> Trainer:
    # 1. The settings and the data
    script, training, model_args, accelerator = scripting.start("dpo", ScriptArguments, DPOConfig)
    tokenizer = scripting.load_tokenizer(model_args, training)
    data, held_out = scripting.load_splits(script, training, columns=[{"chosen", "rejected"}], tokenizer=tokenizer)

    # 2. Checks of what would fail later
    scripting.check_before_loading(model_args, training, tokenizer, data, held_out)
    check_preferences(script, training, data)

    # 3. The model, straight into shards, and the reference that it is compared with: shards of the same checkpoint in
    # the precision of computation, since it is never trained. An adapter is turned off instead, so TRL adds it itself.
    adapter = get_peft_config(model_args)
    dtype = model_args.dtype or ("auto" if adapter else None)
    model = scripting.load_model(model_args, training, accelerator, peft_config=None, dtype=dtype)
    reference = None if adapter else scripting.load_model(model_args, training, accelerator, frozen=True)

    # 4. Train
    trainer = Trainer(
        model=model,
        ref_model=reference,
        args=training,
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=adapter,
    )
    if training.precompute_ref_log_probs:
        trainer.ref_model = reference = None  # its values are next to the data set now
    scripting.train(trainer, training, model_args)

    # 5. A normal Hugging Face checkpoint
    right = [log["eval_rewards/accuracies"] for log in trainer.state.log_history if "eval_rewards/accuracies" in log]
    preferred = f"in {right[-1]:.0%} of the held-out pairs" if right else "not evaluated"
    scripting.finish(trainer, training, model_args, tokenizer, lines={"chosen preferred": preferred})
    return trainer


def check_preferences(script: ScriptArguments, training: DPOConfig, data: datasets.Dataset) -> None:
    """Refuse what no preference can be learnt from, and values of the reference that could be written nowhere."""
    if training.precompute_ref_log_probs and script.dataset_streaming:
        raise ConfigError(
            "--precompute_ref_log_probs writes its values next to the data set, and --dataset_streaming has none on "
            "disk. Leave one of them out."
        )
    if all(row["chosen"] == row["rejected"] for row in data.take(100)):
        raise ConfigError(
            f"In the first rows of {script.dataset_name!r} `chosen` equals `rejected`, so that there is nothing to "
            "prefer. Look at the two columns."
        )


if __name__ == "__main__":
    scripting.run(main, "dpo")
