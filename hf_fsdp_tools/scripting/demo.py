"""Make a small Llama checkpoint on the spot, and the text it learns from, to try the package without a download.

    make_demo_model(folder)       ->  config, seeded random weights in several safetensors files, trained tokenizer
    demo_text()                   ->  passages of prose; `demo_data` makes data sets of them

The text is the language reference that every CPython carries for `help("while")` (`pydoc_data.topics`, 460 kB): English
prose with code in it. The default sizes are so small that a fine-tune has an effect within minutes on two CPU cores
(measured on such a machine with 2 processes, float32, AdamW at 2e-3, 2 x 192 tokens each: the evaluation loss falls
from 7.6 to 4.3 in 702 steps). Wider models learn less in the same time: the number of steps decides.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


PASSAGE_CHARACTERS = 600
"""Characters after which a passage ends at the next blank line; about 200 tokens of the demo tokenizer."""

EVAL_EVERY = 10
"""Every tenth passage is held out for evaluation, so both splits cover all topics."""

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Ids 0 to 5 of the demo tokenizer, in this order."""

RECORD = "demo_model.json"
"""File beside the weights with the arguments of `make_demo_model`; it tells a demo model from a user's own model."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Chat template with one turn per role token. Its `generation` marks let trainers compute the loss on the assistant's
words alone."""


def demo_text() -> list[str]:
    """The demo corpus: about 500 passages of CPython's language reference, in a fixed order, no paragraph twice.

    The text depends on the Python version alone.
    """
    return [passage for _, passage in demo_passages()]


def demo_passages() -> list[tuple[str, str]]:
    """The passages of `demo_text`, each behind the name of its topic ("assert")."""
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
    """The passages of a text, cut at a blank line after PASSAGE_CHARACTERS, or at any line after twice as many."""
    passages: list[str] = []
    lines: list[str] = []
    length = 0
    for line in text.split("\n"):
        lines.append(line)
        length += len(line) + 1
        if length >= (2 * PASSAGE_CHARACTERS if line.strip() else PASSAGE_CHARACTERS):
            passages.append("\n".join(lines).strip("\n"))
            lines, length = [], 0
    return [passage for passage in [*passages, "\n".join(lines).strip("\n")] if passage]


def demo_split() -> tuple[list[str], list[str]]:
    """The demo corpus as (train, eval) passages: every tenth passage is held out."""
    passages = demo_text()
    train = [passage for number, passage in enumerate(passages) if number % EVAL_EVERY]
    return train, passages[::EVAL_EVERY]


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

    It holds `config.json`, `generation_config.json`, float32 weights in safetensors files with their index, and a
    byte-level BPE tokenizer with a chat template, trained on the train split of the demo text. The same arguments under
    the same Python and libraries give the same bytes.

    Args:
        folder: appears in one step, complete or not at all. A folder that was made with the same arguments is left as
            it is; nothing is overwritten.
        hidden_size: features per token; a multiple of `2 * num_heads`.
        num_layers: number of blocks.
        num_heads: number of attention heads.
        num_key_value_heads: number of key and value heads; a divisor of `num_heads`.
        vocab_size: number of tokens of the tokenizer, at least 262 (all bytes and the special tokens).
        max_length: number of positions.
        seed: of the random weights.
        max_shard_size: largest weight file, in bytes or as "1MB".

    Call it on one rank: it uses the CPU, takes a few seconds and communicates nothing.

    Raises:
        ConfigError: the folder holds something else, or the sizes do not make a Llama (all problems are listed).

    Example:
        >>> path = make_demo_model("demo", hidden_size=16, num_layers=1, num_heads=2, vocab_size=300)
        >>> from_pretrained(path, load_kwargs={"progress": False}).config.hidden_size
        16
    """
    target = Path(folder)
    sizes = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "vocab_size": vocab_size,
        "max_length": max_length,
    }
    _check_sizes(**sizes)
    record = {"made_by": "hf_fsdp_tools.make_demo_model", **sizes, "seed": seed, "max_shard_size": max_shard_size}
    if is_made(target, record):
        return target

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_demo_tokenizer(demo_split()[0], vocab_size=vocab_size, max_length=max_length)
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with appearing(target) as partial:
        save_here(model, partial, max_shard_size=max_shard_size)
        tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    is_made(target, record)
    return target


def save_here(model: Any, folder: Path, **options: Any) -> None:
    """`model.save_pretrained` on whichever rank calls: where ranks run, transformers' own writes on rank 0 alone, and
    the first rank of a second machine with a disk of its own would be left without weights."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(folder, **options)


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill in a block, renamed to `folder` once all is in it; nothing is left where the block fails.

    Of several machines with one disk, each has a process that makes the demo: the first that is ready wins.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private to this user, which a checkpoint is not
        try:
            partial.replace(folder)
        except OSError:
            if not (folder.is_dir() and any(folder.iterdir())):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_sizes(
    *, hidden_size: int, num_layers: int, num_heads: int, num_key_value_heads: int, vocab_size: int, max_length: int
) -> None:
    counts = {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads, "max_length": max_length}
    counts["num_key_value_heads"] = num_key_value_heads
    problems = [f"{name} is {value}; it must be at least 1" for name, value in counts.items() if value < 1]
    if not problems:
        if hidden_size % (2 * num_heads):
            problems.append(
                f"hidden_size {hidden_size} with num_heads {num_heads} gives no even head size; "
                f"use a multiple of {2 * num_heads}"
            )
        if num_heads % num_key_value_heads:
            problems.append(f"num_key_value_heads {num_key_value_heads} does not divide num_heads {num_heads}")
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        problems.append(f"vocab_size is {vocab_size}; all bytes and special tokens need at least {smallest}")
    if problems:
        raise ConfigError("the demo model cannot have this shape: " + "; ".join(problems))


def is_made(folder: Path, record: dict[str, object]) -> bool:
    """Whether the folder holds the demo model of these arguments; False where there is nothing yet."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found == record:
        return True
    what = "something that is no demo model" if found is None else "a demo model made with other arguments"
    raise ConfigError(
        f"{folder} already holds {what}, and nothing is overwritten; name a new folder or delete this one"
    )


def train_demo_tokenizer(texts: list[str], *, vocab_size: int, max_length: int) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer of exactly `vocab_size` entries that puts the begin token in front of each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos = SPECIAL_TOKENS[:3]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    if core.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"the demo text yields a vocabulary of {core.get_vocab_size()} and vocab_size is {vocab_size}; ask for less"
        )
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, core.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
    )
