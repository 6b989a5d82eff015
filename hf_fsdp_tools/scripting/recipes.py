"""The recipes of the package, a row each: options, rows, demo, commands, and what memory and time depend on.

Parser, help, checks, estimates and documents read it. No library is imported: help and errors need none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp_tools.text import recipe_commands


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What there is to say of a recipe, but for its docstring."""

    columns: tuple[str, ...] = ()  # Columns of rows; each makes an option for its name in the data set
    defaults: Mapping[str, Any] = field(default_factory=dict)  # Values of options where they differ from TRL's
    demo: str = ""  # The kind of data that it makes where no model is given (`make_demo`)
    demo_options: Mapping[str, Any] = field(default_factory=dict)  # Defaults of options then
    tried_options: Mapping[str, Any] = field(default_factory=dict)
    """The same where a model alone is given, which is tried on the demo's data; {}: data must be given."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Options with which it trains a model of the hub, by launch config; estimated to fit."""
    rates: tuple[float, float] = (1e-5, 2e-4)
    """Learning rates of all parameters and of an adapter to begin with. (usual values; none is searched)"""
    auto_class: str | None = None  # None: the class that the config names
    rows: int = 1  # In each example
    lengths: tuple[str, ...] = ("max_length",)
    """Options for the tokens of a row; "max_completion_length" is half of it, for a prompt may take as many."""
    fields: Mapping[str, Any] = field(default_factory=lambda: {"images": 0})
    """Of `TrainingSetup`, which no option changes; most recipes train on text alone."""
    options: tuple[str, ...] = ()  # All that change memory; () is all of TRL's and the Trainer's
    frozen: str = ""  # The option for a model next to the one that is trained
    note: str = ""  # What an estimate of memory leaves out
    untimed: str = ""  # What else takes time in a step, of which an estimate knows nothing


DEFAULT_RECIPE = "finetune"
_CLASSIFIER = "AutoModelForSequenceClassification"
_OF_QWEN = "--model_name_or_path Qwen/Qwen3-8B --dataset_name"
_OF_LLAMA = "--model_name_or_path meta-llama/Llama-3.1-8B --dataset_name"
_PREFERENCES = f"{_OF_QWEN} trl-lib/ultrafeedback_binarized"
_WRITES: dict[str, Any] = {"lengths": ("max_completion_length",), "rates": (1e-6, 1e-5), "columns": ("prompt",)}
_WRITES["untimed"] = "the time to write the texts"
_WRITES["note"] = "not included: generation (keys and values, weights that stay gathered), and its time"

RECIPES = {
    "accelerate-loop": Recipe(
        columns=("text",),
        demo="text",
        demo_options={"max_steps": 180, "learning_rate": 2e-3, "max_length": 192},
        commands={
            "1x24gb": "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name roneneldan/TinyStories --max_length 512",
            "8x80gb": f"{_OF_LLAMA} roneneldan/TinyStories --max_length 512",
        },
        rates=(2e-5, 2e-5),
        fields={"images": 0, "loss": "full", "sync_each_batch": True, "compile": False},
        options=(
            "model_name_or_path", "dataset_name", "max_length", "per_device_train_batch_size", "optim",
            "gradient_accumulation_steps",
        ),
    ),
    "classify": Recipe(
        columns=("text", "label"),
        defaults={"learning_rate": 2e-5, "lora_task_type": "SEQ_CLS"},  # by which PEFT trains and saves the new head
        demo="classes",
        demo_options={"num_train_epochs": 2, "learning_rate": 1e-3, "max_length": 192},
        commands={
            "1x24gb": f"{_OF_QWEN} fancyzhx/ag_news --use_peft",
            "8x80gb": f"{_OF_QWEN} fancyzhx/ag_news --learning_rate 1e-5",
        },
        auto_class=_CLASSIFIER,
    ),
    "distill": Recipe(
        **_WRITES,
        demo="beginnings",
        demo_options={
            "max_steps": 150, "learning_rate": 3e-3, "beta": 0.0, "max_completion_length": 32,
            "per_device_train_batch_size": 8, "eval_strategy": "steps", "eval_steps": 0.25,
        },
        commands={
            "1x24gb": "--model_name_or_path Qwen/Qwen3-0.6B --teacher_model_name_or_path Qwen/Qwen3-4B "
            "--dataset_name trl-lib/tldr --use_peft --per_device_train_batch_size 4",
            "8x80gb": "--model_name_or_path Qwen/Qwen3-1.7B --teacher_model_name_or_path Qwen/Qwen3-32B "
            "--dataset_name trl-lib/tldr --learning_rate 1e-6 --per_device_train_batch_size 4",
        },
        frozen="teacher_model_name_or_path",
    ),
    "dpo": Recipe(
        columns=("prompt", "chosen", "rejected"),
        demo="preferences",
        demo_options={"num_train_epochs": 1, "learning_rate": 5e-4, "max_length": 256},
        commands={
            "1x24gb": f"{_PREFERENCES} --use_peft --per_device_train_batch_size 1",
            "8x80gb": f"{_PREFERENCES} --learning_rate 5e-7 --per_device_train_batch_size 2 "
            "--gradient_checkpointing true",
        },
        rates=(5e-7, 5e-6),
        rows=2,
        untimed="the pass of the reference",
    ),
    "embed": Recipe(
        # a text that belongs to two of a batch would be a wrong negative of one; and all processes need as many rows
        defaults={
            "lora_task_type": "FEATURE_EXTRACTION", "batch_sampler": "no_duplicates", "dataloader_drop_last": True,
        },
        demo="pairs",
        demo_options={
            "num_train_epochs": 6, "learning_rate": 2e-3, "temperature": 0.1, "max_length": 96,
            "per_device_train_batch_size": 16,
        },
        commands={
            "1x24gb": "--model_name_or_path Qwen/Qwen3-Embedding-4B --dataset_name sentence-transformers/gooaq "
            "--use_peft --dataset_columns question,answer --max_length 256 --per_device_train_batch_size 32",
            "8x80gb": "--model_name_or_path Qwen/Qwen3-Embedding-8B --dataset_name sentence-transformers/gooaq "
            "--dataset_columns question,answer --max_length 256 --per_device_train_batch_size 64 "
            "--learning_rate 1e-5 --gradient_checkpointing true",
        },
        auto_class=_CLASSIFIER,  # whose small head stands for the mean of the tokens
        rows=2,
    ),
    "finetune": Recipe(
        columns=("text", "messages", "prompt", "completion"),
        demo="text",
        demo_options={"num_train_epochs": 6, "learning_rate": 2e-3, "max_length": 192},
        tried_options={"max_steps": 20, "max_length": 192, "use_peft": True, "lora_target_modules": ["all-linear"]},
        commands={
            "1x24gb": f"{_OF_QWEN} trl-lib/Capybara --per_device_train_batch_size 1 --use_peft "
            "--lora_target_modules all-linear --learning_rate 2e-4 --packing true --torch_compile true",
            "1x80gb": f"{_OF_LLAMA} trl-lib/Capybara --max_length 4096 --per_device_train_batch_size 1 "
            "--gradient_accumulation_steps 64 --use_peft --lora_target_modules all-linear",
            "8x80gb": f"{_OF_LLAMA} trl-lib/Capybara --max_length 4096 --per_device_train_batch_size 1 "
            "--gradient_accumulation_steps 8 --learning_rate 1e-5",
        },
    ),
    "grpo": Recipe(
        **_WRITES,
        demo="prompts",
        demo_options={
            "num_train_epochs": 1, "learning_rate": 2e-3, "per_device_train_batch_size": 16,
            "max_completion_length": 16,
        },
        commands={
            "1x80gb": f"{_OF_QWEN} trl-lib/DeepMath-103K --reward_funcs accuracy_reward --use_peft "
            "--per_device_train_batch_size 8 --gradient_checkpointing true",
            "8x80gb": f"{_OF_QWEN} trl-lib/DeepMath-103K --reward_funcs accuracy_reward --learning_rate 1e-6 "
            "--per_device_train_batch_size 8 --gradient_checkpointing true",
        },
        frozen="reward_model_name_or_path",
    ),
    "pretrain": Recipe(
        columns=("text",),
        defaults={"packing": True, "packing_strategy": "bfd_split", "shuffle_dataset": True},
        demo="text",
        demo_options={"dataset_streaming": True, "max_steps": 400, "learning_rate": 2e-3, "max_length": 192},
        commands={
            "1x24gb": "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name HuggingFaceFW/fineweb-edu --dataset_config "
            "sample-10BT --dataset_streaming true --max_steps 10000 --max_length 4096 --per_device_train_batch_size 1",
            "8x80gb": f"{_OF_LLAMA} HuggingFaceFW/fineweb-edu --dataset_config sample-10BT --dataset_streaming true "
            "--max_steps 10000 --max_length 4096 --per_device_train_batch_size 1 --learning_rate 1e-5",
        },
    ),
    "reward": Recipe(
        columns=("prompt", "chosen", "rejected"),
        defaults={"lora_task_type": "SEQ_CLS"},
        demo="preferences",
        demo_options={"num_train_epochs": 1, "learning_rate": 5e-4, "max_length": 512},
        commands={
            "1x24gb": f"{_PREFERENCES} --use_peft --per_device_train_batch_size 1",
            "8x80gb": f"{_PREFERENCES} --learning_rate 1e-5 --per_device_train_batch_size 2",
        },
        auto_class=_CLASSIFIER,
        rows=2,
    ),
    "seq2seq": Recipe(
        columns=("prompt", "completion"),
        defaults={"lora_task_type": "SEQ_2_SEQ_LM", "predict_with_generate": True},
        demo="answers",
        demo_options={"num_train_epochs": 4, "learning_rate": 1e-3, "max_length": 192, "max_target_length": 16},
        commands={
            "1x24gb": "--model_name_or_path google/flan-t5-xl --dataset_name knkarthick/samsum --prompt_column "
            "dialogue --completion_column summary --source_prefix 'summarize: ' --use_peft",
            "8x80gb": "--model_name_or_path facebook/nllb-200-3.3B --dataset_name Helsinki-NLP/opus_books "
            "--dataset_config de-en --prompt_column translation.de --completion_column translation.en "
            "--source_lang deu_Latn --target_lang eng_Latn",
        },
        rates=(1e-4, 5e-4),
        auto_class="AutoModelForSeq2SeqLM",
        lengths=("max_length", "max_target_length"),
    ),
    "tokens": Recipe(
        columns=("tokens", "tags"),
        defaults={"learning_rate": 2e-5, "lora_task_type": "TOKEN_CLS"},
        demo="tags",
        demo_options={"num_train_epochs": 4, "learning_rate": 2e-3, "max_length": 192},
        commands={
            "1x24gb": "--model_name_or_path FacebookAI/xlm-roberta-large --dataset_name lhoestq/conll2003 "
            "--max_length 256 --per_device_train_batch_size 16",
            "8x80gb": f"{_OF_QWEN} lhoestq/conll2003 --max_length 256 --learning_rate 1e-5",
        },
        rates=(2e-5, 2e-4),
        auto_class="AutoModelForTokenClassification",
    ),
    "vision-language": Recipe(
        columns=("image", "messages", "prompt", "completion"),
        defaults={"max_length": 4096},  # one image takes hundreds of tokens, thousands where it is cut into tiles
        demo="images",
        demo_options={
            "num_train_epochs": 3, "per_device_train_batch_size": 4, "learning_rate": 2e-3, "max_length": 64,
        },
        commands={
            "1x24gb": "--model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct --dataset_name trl-lib/llava-instruct-mix "
            "--use_peft --lora_target_modules all-linear --per_device_train_batch_size 1",
            "8x80gb": "--model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct --dataset_name trl-lib/llava-instruct-mix "
            "--learning_rate 1e-5 --per_device_train_batch_size 2 --gradient_checkpointing true",
        },
        auto_class="AutoModelForImageTextToText",
        fields={},
    ),
}  # fmt: skip
"""By the words of the command, `hf-fsdp vision-language`."""


def recipe_of(name: str) -> Recipe:
    """The row of a recipe, by its name or that of its file; of one that is not the package's, an empty one."""
    return RECIPES.get(name.replace("_", "-"), Recipe())


def commands_of(name: str) -> str:
    """The commands of a recipe as they are typed, by its name or that of its file."""
    return recipe_commands(name.replace("_", "-"), recipe_of(name).commands)
