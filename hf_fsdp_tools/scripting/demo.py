"""Small models and data for the recipes' demos, made on the spot: nothing is downloaded.

The text is the language reference that every CPython carries for `help("while")` (`pydoc_data.topics`, 460 kB): English
prose with code in it. The pictures are drawn from the checksums of its passages (`demo_images`).

    text           {"text": passage}
    preferences    {"prompt", "chosen": the passage, "rejected": its words shuffled, or a passage of another topic}
    classes        {"text": passage, "label": the group that its topic belongs to}
    images         {"images", "prompt", "completion"}
"""

import json
import os
import pydoc
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import going_first
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import ConfigError

_FOLDER = Path("outputs", "demo")
"""Folder of demo models and data: beside what recipes write, and never in a folder that is uploaded."""

_PASSAGE_CHARACTERS = 600
"""Characters after which a passage ends at the next blank line; about 200 tokens of the demo tokenizer."""

_EVAL_EVERY = 10
"""Every tenth passage is held out for evaluation, so both splits cover all topics."""

_RECORD = "demo_model.json"
"""File beside the weights with the arguments they were made with; it tells a demo model from a user's own model."""

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Template whose `generation` marks let trainers compute the loss on the assistant's words alone."""


def make_demo(accelerator: Any, kind: str) -> tuple[str, str]:
    """The folders of a small model and of a data set, made by the first rank of each node.

    Both are below `outputs/demo`; a model that is there already is kept.

    Args:
        accelerator: of `make_accelerator`.
        kind: "text", "preferences", "classes", or "images" (a vision-language model and its data).

    The bars of datasets are switched off. Every rank must call. The other ranks wait, and stop if it fails.

    Raises:
        ConfigError: the folder holds something else, or this Python has no `pydoc_data`; on every rank alike.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> model_args.model_name_or_path, script.dataset_name = make_demo(make_accelerator(cpu=True), "classes")
        Quick start: a small model and its data (classes), made on the spot in outputs/demo...
        >>> data, held_out = load_splits(script, training, columns=[{"text", "label"}])
        outputs/demo/classes: ... rows to train on, ... to evaluate
    """
    import datasets

    model, data = _FOLDER / ("vision_model" if kind == "images" else "model"), _FOLDER / kind
    accelerator.print(
        f"Quick start: a small model and its data ({kind}), made on the spot in {_FOLDER}. Give --model_name_or_path "
        "and --dataset_name for your own."
    )
    datasets.disable_progress_bars()  # seven bars for seven short moments
    is_first = rank_on_node()[0] == 0
    with going_first(is_first):
        if is_first:
            _write_demo(model, data, kind)
    return str(model), str(data)


def _write_demo(model: Path, data: Path, kind: str) -> None:
    """Write a demo's model, and its rows, of which every tenth is held out; what is there is kept."""
    from datasets import Dataset

    features = None
    if kind == "images":
        images = import_module("hf_fsdp_tools.scripting.demo_images")
        images.make_demo_vision_model(model)
        rows, features = images.demo_image_rows(), images.image_features()
    else:
        make_demo_model(model)
        rows = demo_rows(kind)
    if data.is_dir():
        return
    split = {"train": [row for number, row in enumerate(rows) if number % _EVAL_EVERY], "eval": rows[::_EVAL_EVERY]}
    with _folder_made_at_once(data) as partial:
        for name, part in split.items():
            Dataset.from_list(part, features).to_parquet(partial / f"{name}.parquet")


def demo_passages() -> list[tuple[str, str]]:
    """About 500 passages, each behind the name of its topic ("assert"), in a fixed order, no paragraph twice."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "the demo text is CPython's module pydoc_data.topics, which this Python lacks (some minimal system "
            "packages leave it out); use a full CPython, for example from python.org, conda or uv"
        ) from error
    seen: set[str] = set()
    passages: list[tuple[str, str]] = []
    for name in sorted(topics):
        paragraphs = dict.fromkeys(part.strip("\n") for part in topics[name].split("\n\n"))
        fresh = [part for part in paragraphs if part.strip() and part not in seen]
        seen.update(fresh)
        passages += [(name, passage) for passage in _passages_of("\n\n".join(fresh))]
    return passages


def _passages_of(text: str) -> list[str]:
    """The passages of a text, cut at a blank line after _PASSAGE_CHARACTERS, or at any line after twice as many."""
    passages: list[str] = []
    lines: list[str] = []
    length = 0
    for line in text.split("\n"):
        lines.append(line)
        length += len(line) + 1
        if length >= (2 * _PASSAGE_CHARACTERS if line.strip() else _PASSAGE_CHARACTERS):
            passages.append("\n".join(lines).strip("\n"))
            lines, length = [], 0
    return [passage for passage in [*passages, "\n".join(lines).strip("\n")] if passage]


def demo_rows(kind: str) -> list[dict[str, Any]]:
    """The rows of a demo data set, one for each passage; the same under the same Python version."""
    passages = demo_passages()
    if kind == "text":
        return [{"text": passage} for _, passage in passages]
    if kind == "classes":
        groups = _groups()
        return [{"text": passage, "label": groups.get(topic, "language")} for topic, passage in passages]
    if kind != "preferences":
        raise ConfigError(f"There is no demo data of the kind {kind!r}; choose text, preferences, classes or images.")
    rows = []
    numbers: dict[str, int] = {}
    for place, (topic, passage) in enumerate(passages):
        number = numbers[topic] = numbers.get(topic, 0) + 1
        question = f"Explain the Python topic {topic!r}." if number == 1 else f"Part {number} on {topic!r}, please."
        answers = {"chosen": passage, "rejected": _worse(place, passages)}
        turns = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
        rows.append({"prompt": [{"role": "user", "content": question}], **turns})
    return rows


def _worse(number: int, passages: list[tuple[str, str]]) -> str:
    """A worse answer than a passage: its words in another order, or a passage of another topic, drawn by the number."""
    topic, passage = passages[number]
    chance = random.Random(number)
    if chance.random() < 0.5:
        words = passage.split()
        chance.shuffle(words)
        return " ".join(words)
    return chance.choice([other for name, other in passages if name != topic])


def _groups() -> dict[str, str]:
    """The group of a topic, as the tables of `help()` show it: by the keywords and topics that they relate to it."""
    related: dict[str, set[str]] = {}
    for table in (pydoc.Helper.topics, pydoc.Helper.keywords):
        for name, target in table.items():
            if isinstance(target, tuple):  # (topic, related names); a plain text refers to another entry
                related.setdefault(target[0], set()).update([name, *target[1].split()])
    types = {"TYPES", "FORMATTING", "SEQUENCES", "MAPPINGS", "DICTIONARYLITERALS", "LISTLITERALS"}
    statements = {name for name in pydoc.Helper.keywords if name.islower()} - {"is", "lambda"}
    groups = {}
    for topic, names in related.items():
        if names & {"SPECIALMETHODS"}:
            groups[topic] = "special methods"
        elif names & types:
            groups[topic] = "types"
        elif names & statements:
            groups[topic] = "statements"
    return groups


def make_demo_model(
    folder: str | os.PathLike[str],
    *,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    vocab_size: int = 2048,
    max_length: int = 1024,
    seed: int = 0,
    max_shard_size: str = "1MB",
) -> Path:
    """Make a checkpoint folder of a small Llama with random weights; return its path.

    It holds the configs, float32 weights in safetensors files with their index, and a byte-level BPE tokenizer with a
    chat template, trained on the demo text. The same arguments under the same Python and libraries give the same bytes.

    Args:
        folder: appears complete or not at all. A folder made with the same arguments is left as it is.
        hidden_size: features per token; a multiple of `2 * num_heads`.
        num_layers: number of blocks.
        num_heads: number of attention heads.
        num_key_value_heads: number of key and value heads; a divisor of `num_heads`.
        vocab_size: number of tokens of the tokenizer, at least 262 (all bytes and the special tokens).
        max_length: number of positions.
        seed: seed of the random weights.
        max_shard_size: largest weight file, in bytes or as "1MB".

    Call it on one rank: it uses the CPU, takes a few seconds and communicates nothing.

    Raises:
        ConfigError: the folder holds something else.

    Example:
        >>> path = make_demo_model("demo", hidden_size=16, num_layers=1, num_heads=2, vocab_size=300)
        >>> from_pretrained(path, load_kwargs={"progress": False}).config.hidden_size
        16
    """
    record = {name: value for name, value in locals().items() if name != "folder"}

    def build() -> tuple[Any, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = train_demo_tokenizer(vocab_size=vocab_size, max_length=max_length)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=-(-hidden_size * 8 // 3 // 32) * 32,  # Llama's 8/3 ratio, rounded to a multiple of 32
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            max_position_embeddings=max_length,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        return LlamaForCausalLM(config), tokenizer

    return make_checkpoint_folder(Path(folder), build, record, seed=seed, max_shard_size=max_shard_size)


def make_checkpoint_folder(folder: Path, build: Any, record: dict[str, Any], *, seed: int = 0, **options: Any) -> Path:
    """Write the model and the tokenizer or processor that `build` makes, unless the folder's record is the same."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        path = folder / _RECORD
        if not path.is_file() or json.loads(path.read_text(encoding="utf-8")) != record:
            raise ConfigError(
                f"{folder} already holds something that is no demo model of these arguments, and nothing is "
                "overwritten; name a new folder or delete this one"
            )
        return folder
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = build()
    with _folder_made_at_once(folder) as partial:
        # Where ranks run, transformers' own writes on rank 0 alone: not on a second machine with a disk of its own.
        model.should_save_on_this_rank = lambda is_main_process: is_main_process
        model.save_pretrained(partial, **options)
        processor.save_pretrained(partial)
        (partial / _RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return folder


@contextmanager
def _folder_made_at_once(folder: Path) -> Iterator[Path]:
    """A folder to fill in a block, renamed to `folder` once all is in it; nothing is left where the block fails.

    Of several machines with one disk, each has a process that makes the demo: the first that is ready wins.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private to this user
        try:
            partial.replace(folder)
        except OSError:
            if not (folder.is_dir() and any(folder.iterdir())):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def train_demo_tokenizer(*, vocab_size: int, max_length: int) -> Any:
    """A byte-level BPE tokenizer, trained on the demo text, that puts the begin token in front of each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (passage for number, (_, passage) in enumerate(demo_passages()) if number % _EVAL_EVERY)
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{special[1]} $A", pair=f"{special[1]} $A $B", special_tokens=[(special[1], 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        additional_special_tokens=special[3:],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=max_length,
    )
