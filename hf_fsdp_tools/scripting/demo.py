"""Small models and data for the recipes' demos, made on the spot: nothing is downloaded.

The text is the language reference that every CPython carries for `help("while")` (`pydoc_data.topics`, 460 kB): English
prose with code in it. Each passage gives a picture too: shape, colour, size and place follow from its checksum.

    text           {"text": passage}
    prompts        {"prompt": a question about its topic}
    beginnings     {"prompt": its first words}, and a model that is a teacher
    preferences    {"prompt", "chosen": the passage, "rejected": its words shuffled, or a passage of another topic}
    classes        {"text": passage, "label": the group that its topic belongs to}
    answers        {"prompt": passage, "completion": that group}, for a model that reads one text and writes another
    tags           {"tokens": words of a passage without quotation marks, "tags": which of them stood in them: code}
    images         {"images", "prompt", "completion": the shape and its colour}
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
from pathlib import Path
from typing import Any
from zlib import crc32

from hf_fsdp_tools.distributed.agreement import going_first
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import ConfigError

_FOLDER = Path("outputs", "demo")
"""Folder of demo models and data: beside what recipes write, and never in a folder that is uploaded."""

_PASSAGE_CHARACTERS = 600
"""Characters after which a passage ends at the next blank line; about 200 tokens of the demo tokenizer."""

_EVAL_EVERY = 10
"""Every tenth passage is held out for evaluation, so both splits cover all topics."""

_PROMPT_WORDS = 8
"""Words of a passage that a student goes on from."""

_SIDE, _PATCH = 32, 8
"""Height and width of the pictures and of the patches in them: 16 tokens stand for a picture."""

_SHAPES, _COLOURS = ("circle", "square", "triangle"), ("red", "green", "blue", "black")

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Template whose `generation` marks let trainers compute the loss on the assistant's words alone."""

_VISION_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Chat template for contents of several parts."""


def make_demo(accelerator: Any, kind: str) -> tuple[str, str]:
    """The folders of a small model and of a data set, made by the first rank of each node.

    Both are below `outputs/demo`; a model that is there already is kept.

    Args:
        accelerator: of `make_accelerator`.
        kind: "text", "prompts", "beginnings" (with a model for a teacher beside it, `teacher`), "pairs", "preferences",
            "classes", "answers" (a T5 and its data), "tags", or "images" (a vision-language model and its data).

    The bars of datasets are switched off. Every rank must call. The other ranks wait, and stop if it fails.

    Raises:
        ConfigError: this Python has no `pydoc_data`; on every rank alike.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> model_args.model_name_or_path, script.dataset_name = make_demo(make_accelerator(cpu=True), "classes")
        Quick start: a small model and its data (classes), made on the spot in outputs/demo...
        >>> data, held_out = load_splits(script, training, columns=[{"text", "label"}])
        outputs/demo/classes: ... rows to train on, ... to evaluate
    """
    import datasets

    makers = {"images": ("vision_model", make_demo_vision_model), "answers": ("seq2seq_model", make_demo_seq2seq_model)}
    name, make_model = makers.get(kind, ("model", make_demo_model))
    model, data = _FOLDER / name, _FOLDER / kind
    accelerator.print(
        f"Quick start: a small model and its data ({kind}), made on the spot in {_FOLDER}. Give --model_name_or_path "
        "and --dataset_name for your own."
    )
    datasets.disable_progress_bars()  # seven bars for seven short moments
    is_first = rank_on_node()[0] == 0
    with going_first(is_first):
        if is_first:
            make_model(model)
            if kind == "beginnings":
                make_demo_teacher(_FOLDER / "teacher")
            if not data.is_dir():
                _write_data(data, kind)
    return str(model), str(data)


def _write_data(folder: Path, kind: str) -> None:
    """Write the rows of a demo as two splits, of which one has every tenth row."""
    from datasets import Dataset

    rows, features = demo_rows(kind), image_features() if kind == "images" else None
    split = {"train": [row for number, row in enumerate(rows) if number % _EVAL_EVERY], "eval": rows[::_EVAL_EVERY]}
    with _folder_made_at_once(folder) as partial:
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
    if kind == "beginnings":
        return [{"prompt": " ".join(passage.split()[:_PROMPT_WORDS])} for _, passage in passages]
    if kind == "pairs":
        lines = [[line for line in passage.split("\n") if line.strip()] for _, passage in passages]
        pairs = [(" ".join(each[::2]), " ".join(each[1::2])) for each in lines if len(each) > 1]
        return [{"anchor": " ".join(first.split()), "positive": " ".join(second.split())} for first, second in pairs]
    if kind == "classes":
        groups = _groups()
        return [{"text": passage, "label": groups.get(topic, "language")} for topic, passage in passages]
    if kind == "answers":
        return [{"prompt": row["text"], "completion": row["label"]} for row in demo_rows("classes")]
    if kind == "tags":
        return [_tagged(passage) for _, passage in passages]
    if kind == "images":
        return [_image_row(crc32(passage.encode())) for _, passage in passages]
    if kind not in ("prompts", "preferences"):
        kinds = "text, prompts, beginnings, pairs, preferences, classes, answers, tags or images"
        raise ConfigError(f"There is no demo data of the kind {kind!r}; choose {kinds}.")
    rows, numbers = [], Counter[str]()
    for place, (topic, passage) in enumerate(passages):
        numbers[topic] += 1
        number = numbers[topic]
        question = f"Explain the Python topic {topic!r}." if number == 1 else f"Part {number} on {topic!r}, please."
        answers = {"chosen": passage, "rejected": _worse(place, passages)}
        rows.append({"prompt": _turn("user", question)} | {name: _turn("assistant", answers[name]) for name in answers})
    return rows if kind == "preferences" else [{"prompt": row["prompt"]} for row in rows]


def _turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _worse(number: int, passages: list[tuple[str, str]]) -> str:
    """A worse answer than a passage: its words in another order, or a passage of another topic, drawn by the number."""
    topic, passage = passages[number]
    chance = random.Random(number)
    if chance.random() < 0.5:
        words = passage.split()
        chance.shuffle(words)
        return " ".join(words)
    return chance.choice([other for name, other in passages if name != topic])


def _tagged(passage: str) -> dict[str, Any]:
    """The words of a passage, and which of them stood between quotation marks: the documents quote all code so."""
    words: list[str] = []
    tags: list[str] = []
    for place, part in enumerate(re.split(r'"([^"\n]+)"', passage)):  # each second part was quoted
        for number, word in enumerate(part.split()):
            words.append(word)
            tags.append("O" if place % 2 == 0 else "I-code" if number else "B-code")
    return {"tokens": words, "tags": tags}


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


def image_features() -> Any:
    """The types of the columns of the rows with images, for `datasets`."""
    from datasets import Features, Image, List, Value

    turns = List({"role": Value("string"), "content": Value("string")})
    return Features({"images": List(Image()), "prompt": turns, "completion": turns})


def _image_row(number: int) -> dict[str, Any]:
    """A shape on white and a question about it; shape, colour, size and place are taken from a number."""
    from PIL import Image, ImageDraw

    number, shape = divmod(number, len(_SHAPES))
    number, colour = divmod(number, len(_COLOURS))
    number, width = divmod(number, _SIDE // 4)
    width += _SIDE // 2
    left, top = (rest % (_SIDE - width) for rest in divmod(number, _SIDE))
    box = (left, top, left + width, top + width)
    triangle = [(left, top + width), (left + width // 2, top), (left + width, top + width)]
    picture = Image.new("RGB", (_SIDE, _SIDE), "white")
    pen = ImageDraw.Draw(picture)
    draw, place = ((pen.ellipse, box), (pen.rectangle, box), (pen.polygon, triangle))[shape]
    draw(place, fill=_COLOURS[colour])
    answer = f"A {_COLOURS[colour]} {_SHAPES[shape]}."
    prompt, completion = _turn("user", "What is in the picture?"), _turn("assistant", answer)
    return {"images": [picture], "prompt": prompt, "completion": completion}


def make_demo_model(
    folder: str | os.PathLike[str],
    *,
    hidden_size: int = 128,
    num_layers: int = 4,
    vocab_size: int = 2048,
    max_length: int = 1024,
    max_shard_size: str = "1MB",
) -> Path:
    """Make a checkpoint folder of a small Llama with random weights and a tokenizer of its own, on one rank.

    The same arguments under the same Python and libraries give the same bytes. A folder that is there is kept.
    """
    from transformers import LlamaForCausalLM

    def build() -> tuple[Any, Any]:
        tokenizer = train_demo_tokenizer(vocab_size=vocab_size, max_length=max_length)
        return LlamaForCausalLM(_llama_config(tokenizer, hidden_size, num_layers)), tokenizer

    return _write_model(Path(folder), build, max_shard_size)


def make_demo_teacher(
    folder: str | os.PathLike[str], *, hidden_size: int = 256, num_layers: int = 2, **sizes: Any
) -> Path:
    """Make a checkpoint folder of a Llama that knows which token follows which in the demo's text.

    Nothing is trained: its embedding and its head are factors of the logarithms of how often one token follows another,
    and its layers add nothing. `sizes` are those of the tokenizer, which is that of `make_demo_model`.
    """
    import torch
    from transformers import LlamaForCausalLM

    def build() -> tuple[Any, Any]:
        tokenizer = train_demo_tokenizer(**{"vocab_size": 2048, "max_length": 1024} | sizes)
        model = LlamaForCausalLM(_llama_config(tokenizer, hidden_size, num_layers))
        counts = torch.zeros(len(tokenizer), len(tokenizer))
        for _, passage in demo_passages():
            ids = torch.tensor(tokenizer(passage + tokenizer.eos_token)["input_ids"])
            counts.index_put_((ids[:-1], ids[1:]), torch.ones(()), accumulate=True)
        alone = (counts.sum(0) + 0.1) / (counts.sum() + 0.1 * len(tokenizer))  # how often a token is met at all
        logits = ((counts + 2 * alone) / (counts.sum(1, keepdim=True) + 2)).log()
        left, scales, right = torch.svd_lowrank(logits - logits.mean(1, keepdim=True), hidden_size - 1, niter=4)
        rows = left * scales.sqrt()
        length = rows.norm(dim=1).max()
        # One more number makes all rows equally long, for the norm before the head divides by their length.
        rest = (length**2 - rows.pow(2).sum(1, keepdim=True)).clamp(min=0).sqrt()
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(torch.cat([rows, rest], 1))
            head = torch.cat([right * scales.sqrt(), torch.zeros(len(tokenizer), 1)], 1)
            model.lm_head.weight.copy_(head * length / hidden_size**0.5)
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        return model, tokenizer

    return _write_model(Path(folder), build)


def make_demo_vision_model(folder: str | os.PathLike[str], *, hidden_size: int = 128, num_layers: int = 4) -> Path:
    """Make a checkpoint folder of a small LLaVA with random weights and its processor, as `make_demo_model`."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    def build() -> tuple[Any, Any]:
        tokenizer = train_demo_tokenizer(vocab_size=1023, max_length=256)
        tokenizer.add_tokens(["<image>"], special_tokens=True)
        processor = LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}),
            tokenizer,
            patch_size=_PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=_VISION_TEMPLATE,
        )
        vision = CLIPVisionConfig(
            hidden_size=hidden_size // 2,
            intermediate_size=hidden_size,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=_SIDE,
            patch_size=_PATCH,
            projection_dim=hidden_size,
        )
        config = LlavaConfig(
            text_config=_llama_config(tokenizer, hidden_size, num_layers),
            vision_config=vision,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        return LlavaForConditionalGeneration(config), processor

    return _write_model(Path(folder), build)


def make_demo_seq2seq_model(folder: str | os.PathLike[str], *, hidden_size: int = 128, num_layers: int = 2) -> Path:
    """Make a checkpoint folder of a small T5 with random weights, and a tokenizer that ends each text."""
    from tokenizers import processors
    from transformers import T5Config, T5ForConditionalGeneration

    def build() -> tuple[Any, Any]:
        tokenizer = train_demo_tokenizer(vocab_size=2048, max_length=1024)
        end = tokenizer.eos_token
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
        )
        config = T5Config(
            vocab_size=len(tokenizer),
            d_model=hidden_size,
            d_kv=hidden_size // 4,
            num_heads=4,
            d_ff=2 * hidden_size,
            num_layers=num_layers,
            feed_forward_proj="gated-gelu",
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
        return T5ForConditionalGeneration(config), tokenizer

    return _write_model(Path(folder), build)


def _llama_config(tokenizer: Any, hidden_size: int, num_layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 3 // 32) * 32,  # Llama's 8/3 ratio, rounded to a multiple of 32
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _write_model(folder: Path, build: Callable[[], tuple[Any, Any]], max_shard_size: str = "5GB") -> Path:
    """Write the model and the tokenizer or processor that `build` makes, unless the folder is there."""
    import torch

    if not folder.exists():
        with torch.random.fork_rng(devices=[]), _folder_made_at_once(folder) as partial:
            torch.manual_seed(0)
            model, processor = build()
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
