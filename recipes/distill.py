"""Distil a causal language model under FSDP2: a student writes, and learns what its teacher would have written.

Nothing to download: a small Llama learns to go on with texts as a wider one does, which is random too but sure of what
follows. On two CPU processes the loss, their divergence on what the student writes, falls from 3.4 to below 0.4.

The teacher is sharded as the student is, in the precision of computation, and never whole on a rank: in bf16, 32B
parameters add 8 GB to each of eight GPUs. Estimates know both (`--frozen-models TEACHER`), but not what writes the
texts. `--beta` chooses the divergence (1: of the student from the teacher, 0: the other way round). Rows have a
`prompt`, text or turns of a chat. The two models must have one vocabulary.
"""

from dataclasses import replace
from pathlib import Path

import datasets
from transformers import AutoConfig, PreTrainedTokenizerBase
from trl import DistillationConfig, DistillationTrainer, ScriptArguments

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, scripting


class Trainer(FSDPTrainerMixin, DistillationTrainer):
    """TRL's DistillationTrainer on our shards."""


def main() -> Trainer:
    # 1. The settings and the data
    script, training, model_args, accelerator = scripting.start("distill", ScriptArguments, DistillationConfig)
    if model_args.is_demo:
        training.teacher_model_name_or_path = str(Path(model_args.model_name_or_path).with_name("teacher"))
    tokenizer = scripting.load_tokenizer(model_args, training)
    data, held_out = scripting.load_splits(script, training, columns=[{"prompt"}], tokenizer=tokenizer)

    # 2. Checks of what would fail later
    scripting.check_before_loading(model_args, training, tokenizer, data, held_out)
    of_teacher = teacher_arguments(model_args, training)
    check_pair(model_args, of_teacher, training, tokenizer, data)

    # 3. The student, straight into shards, with an adapter if one is asked for; and its teacher
    model = scripting.load_model(model_args, training, accelerator)
    teacher = scripting.load_model(of_teacher, training, accelerator, frozen=True)

    # 4. Train
    trainer = Trainer(
        model=model,
        teacher_model=teacher,
        args=training,
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    scripting.train(trainer, training, model_args)

    # 5. A normal Hugging Face checkpoint
    scripting.finish(trainer, training, model_args, tokenizer)
    return trainer


def teacher_arguments(model_args: scripting.ModelArguments, training: DistillationConfig) -> scripting.ModelArguments:
    """What the teacher is loaded by: the student's options, without its adapter and its 4 bits."""
    name, revision = training.teacher_model_name_or_path, training.teacher_model_revision or "main"
    if name is None:
        raise ConfigError("--teacher_model_name_or_path is missing: name a larger model with the same vocabulary.")
    if training.teacher_model_init_kwargs:
        raise ConfigError(
            "--teacher_model_init_kwargs is for a teacher that TRL loads, whole on each rank. Leave it out; "
            "--teacher_model_revision and --attn_implementation count."
        )
    alone = {"use_peft": False, "load_in_4bit": False, "dequantize": True}
    return replace(model_args, model_name_or_path=name, model_revision=revision, **alone)


def check_pair(
    student: scripting.ModelArguments,
    teacher: scripting.ModelArguments,
    training: DistillationConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: datasets.Dataset,
) -> None:
    """Refuse two models whose numbers of tokens mean different words, and prompts that leave no room for an answer."""
    names = [each.model_name_or_path for each in (student, teacher)]
    if scripting.load_tokenizer(teacher, training).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{names[1]} and {names[0]} have different tokenizers, so that a token of one is another word to the "
            "other. Give a teacher of the student's family."
        )
    hub = {"trust_remote_code": training.trust_remote_code}
    configs = [
        AutoConfig.from_pretrained(each.model_name_or_path, revision=each.model_revision, **hub).get_text_config()
        for each in (student, teacher)
    ]
    if configs[0].vocab_size != configs[1].vocab_size:
        raise ConfigError(
            f"{names[0]} has {configs[0].vocab_size:,} rows for tokens and {names[1]} {configs[1].vocab_size:,}, and "
            "TRL compares all of them. Give a teacher with as many."
        )
    prompts = [row["prompt"] for row in data.take(100)]
    longest = max(len(encode(prompt, tokenizer)) for prompt in prompts) + training.max_completion_length
    for name, config in zip(names, configs, strict=True):
        positions = getattr(config, "max_position_embeddings", None) or longest
        if longest > positions:
            raise ConfigError(
                f"A prompt and --max_completion_length {training.max_completion_length} are {longest} tokens, and "
                f"{name} has {positions} positions. Give a shorter one, or shorter prompts."
            )


def encode(prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a prompt, as TRL makes them."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)


if __name__ == "__main__":
    scripting.run(main, "distill")
