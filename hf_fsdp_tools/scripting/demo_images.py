"""Make a small LLaVA checkpoint with its processor on the spot, and pictures with questions that it learns to answer.

Each passage of the demo text (`demo_passages`) gives a picture: shape, colour, size and place follow from its checksum,
and so does what is asked and answered about it. The answer cannot be known without the picture.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

from hf_fsdp_tools.scripting.demo import (
    EVAL_EVERY,
    RECORD,
    appearing,
    demo_passages,
    demo_split,
    is_made,
    save_here,
    train_demo_tokenizer,
)

SIDE, PATCH = 32, 8
"""Height and width of the pictures and of the patches in them: 16 tokens stand for a picture."""

SHAPES = ("circle", "square", "triangle")
COLOURS = ("red", "green", "blue", "black")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""The demo model's chat template for contents of several parts."""


def write_demo_images(model: Path, data: Path) -> None:
    """Write the demo model and its data, every tenth row held out; a model and data that are there are kept.

    Call it on one rank; nothing is communicated.
    """
    from datasets import Dataset, DatasetDict

    make_demo_vision_model(model)
    features = image_features()
    rows = demo_image_rows()
    split = {
        "train": [row for number, row in enumerate(rows) if number % EVAL_EVERY],
        "eval": rows[::EVAL_EVERY],
    }
    with appearing(data) as partial:
        DatasetDict({name: Dataset.from_list(part, features) for name, part in split.items()}).save_to_disk(partial)
        shutil.rmtree(data, ignore_errors=True)


def image_features() -> Any:
    """The types of the columns of `demo_image_rows`, for `datasets`."""
    from datasets import Features, Image, List, Value

    turns = List({"role": Value("string"), "content": Value("string")})
    return Features({"images": List(Image()), "prompt": turns, "completion": turns})


def demo_image_rows() -> list[dict[str, Any]]:
    """One row for each passage: `images` (one), `prompt` and `completion`; the same under the same Python version."""
    rows = []
    for _, passage in demo_passages():
        number = crc32(passage.encode())
        number, shape = divmod(number, len(SHAPES))
        number, colour = divmod(number, len(COLOURS))
        answer = f"A {COLOURS[colour]} {SHAPES[shape]}."
        rows.append(
            {
                "images": [_picture(SHAPES[shape], COLOURS[colour], number)],
                "prompt": [{"role": "user", "content": "What is in the picture?"}],
                "completion": [{"role": "assistant", "content": answer}],
            }
        )
    return rows


def _picture(shape: str, colour: str, number: int) -> Any:
    """A shape on white, its size and place taken from a number."""
    from PIL import Image, ImageDraw

    number, width = divmod(number, SIDE // 4)
    width += SIDE // 2
    left, top = (rest % (SIDE - width) for rest in divmod(number, SIDE))
    box = (left, top, left + width, top + width)
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(left, top + width), (left + width // 2, top), (left + width, top + width)], fill=colour)
    return picture


def make_demo_vision_model(
    folder: str | os.PathLike[str], *, hidden_size: int = 128, num_layers: int = 4, vision_layers: int = 2
) -> Path:
    """Make a checkpoint folder of a small LLaVA with random weights and its processor; return its path.

    Call it on one rank: it uses the CPU, takes a few seconds and communicates nothing.
    """
    target = Path(folder)
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "vision_layers": vision_layers}
    record: dict[str, object] = {"made_by": "hf_fsdp_tools.scripting.demo_images", **sizes}
    if is_made(target, record):
        return target

    import torch
    from transformers import LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = train_demo_tokenizer(demo_split()[0], vocab_size=1023, max_length=256)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    side = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=side),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(_config(tokenizer, **sizes))
    with appearing(target) as partial:
        save_here(model, partial)
        processor.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    is_made(target, record)
    return target


def _config(tokenizer: Any, *, hidden_size: int, num_layers: int, vision_layers: int) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=hidden_size // 2,
        intermediate_size=hidden_size,
        num_hidden_layers=vision_layers,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=hidden_size,
    )
    return LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
