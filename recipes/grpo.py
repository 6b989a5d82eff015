"""Train a causal language model on rewards of its own answers (GRPO) under FSDP2, to a normal Hugging Face checkpoint.

Nothing to download: a small Llama without any training answers questions about CPython's documentation, and learns to
answer with keywords of Python, by a reward below. On two CPU processes their share rises to above 0.9 in two minutes.

A reward function, TRL's or yours (`--reward_funcs my_rewards.py:short_reward`), takes `completions`, columns of rows by
their names and `**kwargs`, and returns one number for each completion, or None. Texts are written by transformers
itself, with all weights gathered once for each batch where they fit (`--ds3_gather_for_generation false`: one unit
after the other), or by vLLM. `--beta 0.04` keeps the policy near its beginning: a second set of shards, or the adapter
turned off. Rows have a `prompt`, text or turns of a chat.
"""

import keyword
from typing import Any

from transformers import AutoModelForSequenceClassification
from trl import GRPOConfig, GRPOTrainer, get_peft_config
from trl.scripts.grpo import GRPOScriptArguments

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, from_pretrained, scripting


class Trainer(FSDPTrainerMixin, GRPOTrainer):
    """TRL's GRPOTrainer on our shards."""


def keywords(completions: list[Any], **kwargs: Any) -> list[float]:
    """The share of a completion's words that are keywords of Python: the demo's reward."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [sum(map(keyword.iskeyword, text.split())) / max(1, len(text.split())) for text in texts]


def main() -> Trainer:
    # 1. The settings, the data and the rewards
    script, training, model_args, accelerator = scripting.start("grpo", GRPOScriptArguments, GRPOConfig)
    tokenizer = scripting.load_tokenizer(model_args, training)
    data, held_out = scripting.load_splits(script, training, columns=[{"prompt"}], tokenizer=tokenizer)

    # 2. Checks of what would fail later
    columns = data.column_names or next(iter(data))
    rewards = [keywords] if model_args.is_demo else scripting.load_rewards(script, columns)
    scripting.check_before_loading(model_args, training, tokenizer, data, held_out)
    check_online(script, rewards)

    # 3. A reward model, and the model, straight into shards by the same policy. TRL adds an adapter itself,
    # and turns it off where it needs the reference.
    adapter = get_peft_config(model_args)
    dtype = model_args.dtype or ("auto" if adapter else None)
    if script.reward_model_name_or_path is not None:
        rewards.insert(0, load_reward_model(script.reward_model_name_or_path, accelerator))
    model = scripting.load_model(model_args, training, accelerator, peft_config=None, dtype=dtype)

    # 4. Train
    trainer = Trainer(
        model=model,
        reward_funcs=rewards,
        args=training,
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=adapter,
    )
    scripting.train(trainer, training, model_args)

    # 5. A normal Hugging Face checkpoint
    scripting.finish(trainer, training, model_args, tokenizer)
    return trainer


def check_online(script: GRPOScriptArguments, rewards: list[Any]) -> None:
    """Refuse a run without rewards, and rows that are no whole data set."""
    if not rewards and script.reward_model_name_or_path is None:
        raise ConfigError(
            "Nothing rewards an answer. Give --reward_funcs my_rewards.py:NAME, or --reward_model_name_or_path."
        )
    if script.dataset_streaming:
        raise ConfigError(
            "--dataset_streaming gives each process rows of its own, and the answers to one prompt are divided among "
            "processes. Leave it out."
        )


def load_reward_model(name: str, accelerator: Any) -> Any:
    """Shards of a model with one score for a text, which is not trained."""
    scorer = AutoModelForSequenceClassification
    options = {"auto_class": scorer, "num_labels": 1, "dtype": "auto", "output_loading_info": True}
    model, report = from_pretrained(name, accelerator=accelerator, **options)
    if report.initialized_keys:
        raise ConfigError(f"--reward_model_name_or_path {name}: its files have no head that gives a score.")
    return model.requires_grad_(False)


if __name__ == "__main__":
    scripting.run(main, "grpo")
