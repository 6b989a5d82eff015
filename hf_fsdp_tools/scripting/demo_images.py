"""A small LLaVA checkpoint with its processor, and pictures with questions that it learns to answer.

Each passage of the demo text gives a picture: shape, colour, size and place follow from its checksum, and so does the
answer to the question about it, which cannot be known without the picture.
"""

import os
from pathlib import Path
from typing import Any
from zlib import crc32

from hf_fsdp_tools.scripting.demo import demo_passages, make_checkpoint_folder, train_demo_tokenizer

_SIDE, _PATCH = 32, 8
"""Height and width of the pictures and of the patches in them: 16 tokens stand for a picture."""

_SHAPES, _COLOURS = ("circle", "square", "triangle"), ("red", "green", "blue", "black")

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Chat template for contents of several parts."""


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
        number, shape = divmod(number, len(_SHAPES))
        number, colour = divmod(number, len(_COLOURS))
        answer = f"A {_COLOURS[colour]} {_SHAPES[shape]}."
        rows.append(
            {
                "images": [_picture(_SHAPES[shape], _COLOURS[colour], number)],
                "prompt": [{"role": "user", "content": "What is in the picture?"}],
                "completion": [{"role": "assistant", "content": answer}],
            }
        )
    return rows


def _picture(shape: str, colour: str, number: int) -> Any:
    """A shape on white, its size and place taken from a number."""
    from PIL import Image, ImageDraw

    number, width = divmod(number, _SIDE // 4)
    width += _SIDE // 2
    left, top = (rest % (_SIDE - width) for rest in divmod(number, _SIDE))
    box = (left, top, left + width, top + width)
    picture = Image.new("RGB", (_SIDE, _SIDE), "white")
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
    """Make a checkpoint folder of a small LLaVA with random weights and its processor on one rank; return its path."""
    record = {name: value for name, value in locals().items() if name != "folder"}

    def build() -> tuple[Any, Any]:
        from transformers import (
            CLIPVisionConfig,
            LlamaConfig,
            LlavaConfig,
            LlavaForConditionalGeneration,
            LlavaProcessor,
        )
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        tokenizer = train_demo_tokenizer(vocab_size=1023, max_length=256)
        tokenizer.add_tokens(["<image>"], special_tokens=True)
        processor = LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}),
            tokenizer,
            patch_size=_PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=_CHAT_TEMPLATE,
        )
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        text = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=tokenizer.bos_token_id,
            **ends,
        )
        vision = CLIPVisionConfig(
            hidden_size=hidden_size // 2,
            intermediate_size=hidden_size,
            num_hidden_layers=vision_layers,
            num_attention_heads=2,
            image_size=_SIDE,
            patch_size=_PATCH,
            projection_dim=hidden_size,
        )
        config = LlavaConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1,
            tie_word_embeddings=False,
            **ends,
        )
        return LlavaForConditionalGeneration(config), processor

    return make_checkpoint_folder(Path(folder), build, record)
