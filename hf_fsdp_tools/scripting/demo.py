"""Small models and data for the recipes' demos, made on the spot: nothing is downloaded.

The text is the language reference that every CPython carries for `help("while")` (`pydoc_data.topics`, 460 kB): English
prose with code in it, in passages.
"""

import os
import pydoc
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from hf_fsdp_tools.distributed.agreement import going_first
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import listed

_FOLDER = Path("outputs", "demo")
"""Folder of demo models and data: next to what recipes write, and never in a folder that is uploaded."""

_PASSAGE_CHARACTERS = 600  # About 200 tokens of the demo tokenizer
_EVAL_EVERY = 10  # Every tenth passage is held out, so both splits cover all topics
_SIDE, _PATCH = 32, 8  # Height and width of pictures and of the patches in them: 16 tokens stand for a picture

_SHAPES, _COLOURS = ("circle", "square", "triangle"), ("red", "green", "blue", "black")

_CHAT_TEMPLATE = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ text(message['content']) + eos_token }}"
    "{% endgeneration %}"
    "{% else %}{{ text(message['content']) + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Template for texts and parts, whose `generation` marks let trainers compute the loss on the assistant's words."""


def make_demo(accelerator: Any, kind: str, model: str | None = None) -> tuple[str, str]:
    """The folders of a small model and of a data set below `outputs/demo`, made by the first rank of each node.

    `model` is one that is there, in place of the small one.

    The kind of the data decides the model: "text", "prompts", "beginnings" (with a model for a teacher next to it,
    `teacher`), "pairs", "preferences", "classes", "answers", "tags" or "images". What is there already is kept. Every
    rank must call. The other ranks wait, and stop if it fails.

    Raises:
        ConfigError: this Python has no `pydoc_data`; on every rank alike.

    Example:
        >>> make_demo(make_accelerator(cpu=True), "classes")
        Quick start: a small model and its data (classes), made on the spot in outputs/demo...
        ('outputs/demo/model', 'outputs/demo/classes')
    """
    import datasets

    name = {"images": "vision_model", "answers": "seq2seq_model"}.get(kind, "model")
    made, options = f"data ({kind})", "--dataset_name"
    if model is None:
        made, options = f"a small model and its {made}", f"--model_name_or_path and {options}"
    accelerator.print(f"Quick start: {made}, made on the spot in {_FOLDER}. Give {options} for your own.")
    datasets.disable_progress_bars()  # seven bars for seven short moments
    is_first = rank_on_node()[0] == 0
    with going_first(is_first):
        for each in [name, *["teacher"] * (kind == "beginnings")] if is_first and model is None else ():
            make_demo_model(_FOLDER / each, each)
        if is_first and not (_FOLDER / kind).is_dir():
            rows, features = demo_rows(kind), image_features() if kind == "images" else None
            train = [row for number, row in enumerate(rows) if number % _EVAL_EVERY]
            with _folder_made_at_once(_FOLDER / kind) as partial:
                for split, part in (("train", train), ("eval", rows[::_EVAL_EVERY])):
                    datasets.Dataset.from_list(part, features).to_parquet(partial / f"{split}.parquet")
    return model or str(_FOLDER / name), str(_FOLDER / kind)


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
        cut = [""]  # at a blank line after so many characters, or at any line after twice as many
        for line in "\n\n".join(fresh).split("\n"):
            cut[-1] += f"{line}\n"
            if len(cut[-1]) >= _PASSAGE_CHARACTERS * (2 if line.strip() else 1):
                cut.append("")
        passages += [(name, passage.strip("\n")) for passage in cut if passage.strip("\n")]
    return passages


def demo_rows(kind: str) -> list[dict[str, Any]]:
    """The rows of a demo data set, one for each passage; the same under the same Python version."""
    if kind not in _ROWS:
        raise ConfigError(f"There is no demo data of the kind {kind!r}; choose {listed(_ROWS, 99)}.")
    numbers = Counter[str]()
    rows = []
    for topic, passage in demo_passages():
        numbers[topic] += 1
        rows.append(_ROWS[kind](topic, passage, numbers[topic]))
    return [row for row in rows if row]


def _turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _question(topic: str, passage: str, number: int) -> dict[str, Any]:
    first = f"Explain the Python topic {topic!r}."
    return {"prompt": _turn("user", first if number == 1 else f"Part {number} on {topic!r}, please.")}


def _preference(topic: str, passage: str, number: int) -> dict[str, Any]:
    """The passage before the same words shuffled."""
    words = passage.split()
    random.Random(passage).shuffle(words)
    # stripped, for spaces at the beginning would merge with the prompt's end into one token
    answers = {"chosen": passage.strip(), "rejected": " ".join(words)}
    return _question(topic, passage, number) | {name: _turn("assistant", text) for name, text in answers.items()}


def _pair(topic: str, passage: str, number: int) -> dict[str, Any]:
    """Every other line, and the lines between; nothing where a passage is one line."""
    lines = [line for line in passage.split("\n") if line.strip()]
    first, second = (" ".join(" ".join(part).split()) for part in (lines[::2], lines[1::2]))
    return {"anchor": first, "positive": second} if second else {}


def _tagged(topic: str, passage: str, number: int) -> dict[str, Any]:
    """The words of a passage, and which of them stood between quotation marks: the documents quote all code so."""
    rows = [
        (word, "O" if place % 2 == 0 else "I-code" if number else "B-code")
        for place, part in enumerate(re.split(r'"([^"\n]+)"', passage))  # each second part was quoted
        for number, word in enumerate(part.split())
    ]
    return {"tokens": [word for word, _ in rows], "tags": [tag for _, tag in rows]}


@cache
def _groups() -> dict[str, str]:
    """The group of a topic, as the tables of `help()` show it: by the keywords and topics that they relate to it."""
    related: dict[str, set[str]] = {}
    for table in (pydoc.Helper.topics, pydoc.Helper.keywords):
        for name, target in table.items():
            if isinstance(target, tuple):  # (topic, related names); a plain text refers to another entry
                related.setdefault(target[0], set()).update([name, *target[1].split()])
    statements = {name for name in pydoc.Helper.keywords if name.islower()} - {"is", "lambda"}
    kinds = {
        "special methods": {"SPECIALMETHODS"},
        "types": {"TYPES", "FORMATTING", "SEQUENCES", "MAPPINGS", "DICTIONARYLITERALS", "LISTLITERALS"},
        "statements": statements,
        "language": set().union(*related.values()),
    }
    return {topic: next(kind for kind in kinds if names & kinds[kind]) for topic, names in related.items()}


def image_features() -> Any:
    """The types of the columns of the rows with images, for `datasets`."""
    from datasets import Features, Image, List, Value

    turns = List({"role": Value("string"), "content": Value("string")})
    return Features({"images": List(Image()), "prompt": turns, "completion": turns})


def _picture(topic: str, passage: str, number: int) -> dict[str, Any]:
    """A shape on white and a question about it; shape, colour, size and place are taken from the passage's checksum."""
    from PIL import Image, ImageDraw

    rest, shape = divmod(crc32(passage.encode()), len(_SHAPES))
    rest, colour = divmod(rest, len(_COLOURS))
    rest, width = divmod(rest, _SIDE // 4)
    width += _SIDE // 2
    left, top = (place % (_SIDE - width) for place in divmod(rest, _SIDE))
    box = (left, top, left + width, top + width)
    triangle = [(left, top + width), (left + width // 2, top), (left + width, top + width)]
    picture = Image.new("RGB", (_SIDE, _SIDE), "white")
    pen = ImageDraw.Draw(picture)
    draw, place = ((pen.ellipse, box), (pen.rectangle, box), (pen.polygon, triangle))[shape]
    draw(place, fill=_COLOURS[colour])
    prompt = _turn("user", "What is in the picture?")
    completion = _turn("assistant", f"A {_COLOURS[colour]} {_SHAPES[shape]}.")
    return {"images": [picture], "prompt": prompt, "completion": completion}


_ROWS: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    "text": lambda topic, passage, number: {"text": passage},
    "prompts": _question,
    "beginnings": lambda topic, passage, number: {"prompt": " ".join(passage.split()[:8])},
    "pairs": _pair,
    "preferences": _preference,
    "classes": lambda topic, passage, number: {"text": passage, "label": _groups().get(topic, "language")},
    "answers": lambda topic, passage, number: {"prompt": passage, "completion": _groups().get(topic, "language")},
    "tags": _tagged,
    "images": _picture,
}
"""The row of the n-th passage of a topic, for each kind of data."""


_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _decoder(tokenizer: Any, hidden: int, layers: int) -> tuple[Any, dict[str, Any]]:
    """The processor of a Llama, and the arguments of its config."""
    config = {"vocab_size": len(tokenizer), "hidden_size": hidden, "num_hidden_layers": layers, **_ENDS}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config["intermediate_size"] = -(-hidden * 8 // 3 // 32) * 32  # Llama's 8/3 ratio, rounded to a multiple of 32
    return tokenizer, config | {"max_position_embeddings": tokenizer.model_max_length}


def _with_tower(tokenizer: Any, hidden: int, layers: int) -> tuple[Any, dict[str, Any]]:
    """The same of a LLaVA, which sees pictures."""
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer.add_tokens(["<image>"], special_tokens=True)
    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}),
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_CHAT_TEMPLATE,
    )
    tower = {"hidden_size": hidden // 2, "intermediate_size": hidden, "projection_dim": hidden}
    tower |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": _SIDE, "patch_size": _PATCH}
    return processor, {
        "text_config": transformers.LlamaConfig(**_decoder(tokenizer, hidden, layers)[1]),
        "vision_config": transformers.CLIPVisionConfig(**tower),
        "image_token_index": len(tokenizer) - 1,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        **_ENDS,
    }


def _encoder_decoder(tokenizer: Any, hidden: int, layers: int) -> tuple[Any, dict[str, Any]]:
    """The same of a T5, whose tokenizer ends each text."""
    from tokenizers import processors

    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "d_model": hidden,
        "d_kv": hidden // 4,
        "d_ff": 2 * hidden,
        **_ENDS,
    }
    config |= {"num_layers": layers, "num_heads": 4, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
    return tokenizer, config


_MODELS = {
    "model": ("LlamaForCausalLM", _decoder, 128, 4),
    "teacher": ("LlamaForCausalLM", _decoder, 256, 2),
    "vision_model": ("LlavaForConditionalGeneration", _with_tower, 128, 4),
    "seq2seq_model": ("T5ForConditionalGeneration", _encoder_decoder, 128, 2),
}
"""The class of each kind of model, its processor and config, its width and its layers."""


def make_demo_model(
    folder: str | os.PathLike[str],
    kind: str = "model",
    *,
    hidden_size: int | None = None,
    num_layers: int | None = None,
    vocab_size: int = 2048,
    max_length: int = 1024,
    max_shard_size: str = "1MB",
) -> Path:
    """Make a checkpoint folder of a small model with random weights and a tokenizer or processor, on one rank.

    The kind is "model" (a Llama), "teacher" (a wider one that is sure of what follows), "vision_model" (a LLaVA,
    of which the tokenizer is given) or "seq2seq_model" (a T5). The same arguments under the same Python and libraries
    give the same bytes. A folder that is there is kept.
    """
    import torch
    import transformers

    folder = Path(folder)
    if folder.exists():
        return folder
    name, parts_of, hidden, layers = _MODELS[kind]
    sizes = (1023, 256) if kind == "vision_model" else (vocab_size, max_length)
    tokenizer = train_demo_tokenizer(vocab_size=sizes[0], max_length=sizes[1])
    processor, config = parts_of(tokenizer, hidden_size or hidden, num_layers or layers)
    with torch.random.fork_rng(devices=[]), _folder_made_at_once(folder) as partial:
        torch.manual_seed(0)
        kind_of_model = getattr(transformers, name)
        model = kind_of_model(kind_of_model.config_class(**config))
        if kind == "teacher":  # it prefers some tokens, and others after some
            model.model.embed_tokens.weight.data.add_(0.02)
            model.lm_head.weight.data.mul_(10)
        # Where ranks run, transformers' own writes on rank 0 alone: not on a second machine with its own disk.
        model.should_save_on_this_rank = lambda is_main_process: is_main_process
        model.save_pretrained(partial, max_shard_size=max_shard_size)
        processor.save_pretrained(partial)
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
    from tokenizers import ByteLevelBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
    core = ByteLevelBPETokenizer()
    texts = (passage for number, (_, passage) in enumerate(demo_passages()) if number % _EVAL_EVERY)
    options = {"min_frequency": 0, "special_tokens": special, "show_progress": False}
    core.train_from_iterator(texts, vocab_size, **options)
    core.post_processor = processors.TemplateProcessing(
        single=f"{special[1]} $A", pair=f"{special[1]} $A $B", special_tokens=[(special[1], 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer,
        pad_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        additional_special_tokens=special[3:],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=max_length,
    )
