"""A page that says whether a fine-tune fits, how fast it runs, and which command starts it: a Space for `gradio`."""

import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_fsdp_tools import TrainingSetup, estimate_memory, estimate_throughput

GPUS = ("h100-80gb", "h200-141gb", "b200-180gb", "a100-80gb", "a100-40gb", "l40s-48gb", "a10g-24gb", "l4-24gb")
GPUS += ("rtx-4090", "rtx-5090", "rtx-pro-6000", "mi300x")
METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_r": 16},
    "QLoRA (base in 4 bits)": {"lora_r": 16, "load_in_4bit": True},
    "all weights, AdamW in fp32": {},
    "all weights, 8-bit AdamW in bf16": {"optimizer": "adamw_8bit", "master_dtype": "bf16"},
}
OPTIONS = {"lora_r": "--lora-r", "load_in_4bit": "--load-in-4bit", "optimizer": "--optimizer"}
OPTIONS |= {"master_dtype": "--master-dtype"}


def whole(text: str, name: str) -> int:
    """A count that somebody typed: 4096, "4,096" or "4k"."""
    found = re.fullmatch(r"(\d[\d,_ ]{0,11})(k?)", str(text).strip().lower())
    number = int(re.sub(r"\D", "", found[1])) * (1024 if found[2] else 1) if found else 0
    if number < 1:
        raise ValueError(f"{name}: {text!r} is no whole number above 0. Type one, such as 8 or 4096.")
    return number


LARGEST = 10**8
"""Of numbers in a config: a visitor's estimate is to end in some seconds."""

MOST = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 200)
MOST |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1024)


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """A config, and those in it."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(part)


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a config."""
    for part in parts(value):
        yield from (each for each in part.values() if isinstance(each, int | float) and abs(each) != float("inf"))


def source(model: str, config: str, folder: str) -> str:
    """What is estimated: a name on the hub, or a file with the `config.json` that was pasted."""
    if not config.strip():
        name = model.strip()
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or Path(name).exists():  # what is here is for no visitor
            raise ValueError("Give a model's name on the hub, such as Qwen/Qwen3-8B, or paste its config.json.")
        return name
    try:
        content = json.loads(config)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"This is no config.json: {error}.") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError('This config.json has no "model_type", which names the architecture. Paste the whole file.')
    if large := next((number for number in numbers(content) if abs(number) > LARGEST), None):
        raise ValueError(f"This config.json has {large:,}, which no model has.")
    for part in parts(content):
        for name, most in MOST.items():
            if isinstance(part.get(name), int) and part[name] > most:
                raise ValueError(f"This page takes models of up to {most} {name}, and this has {part[name]:,}.")
    file = Path(folder, "config.json")
    file.write_text(config)
    return str(file)


def answer(
    model: str, config: str, gpu: str, gpus: str, length: str, batch: str, method: str, checkpointing: bool
) -> tuple[str, list[list[Any]], str]:
    """The verdict and the speed as Markdown, memory by part in GB, and the command; or what is wrong, and nothing."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            setup = TrainingSetup(
                gpu=gpu,
                num_processes=whole(gpus, "GPUs"),
                max_length=whole(length, "Tokens per row"),
                per_device_train_batch_size=whole(batch, "Rows per GPU"),
                activation_checkpointing=checkpointing,
                **METHODS[method],
            )
            name = source(model, config, folder)
            memory, speed = estimate_memory(name, setup), estimate_throughput(name, setup)
    except Exception as error:  # gradio would show "Error" alone; a visitor's values are of any type and size
        shown = re.sub(r"'?/\S+/config\.json'?", "config.json", (str(error) or type(error).__name__).splitlines()[0])
        return f"### {shown}", [], ""
    parts = {**memory.at_peak, "cached by the allocator": memory.peak_reserved - memory.peak_allocated}
    sizes = sorted({**parts, **memory.outside}.items(), key=lambda item: -item[1])
    rows = [[part, round(size / 1e9, 2)] for part, size in sizes if size > 5e6]
    verdict = next(line for line in str(memory).splitlines() if line.startswith(("fits", "does not fit")))
    lines = [f"### {verdict}", f"{memory.total / 1e9:.1f} GB on each GPU."]
    if speed.range is None:
        lines.append(f"Tokens/s are not estimated: {speed.source}.")
    else:
        low, high = speed.range
        rate = speed.tokens_per_second_per_gpu
        lines.append(f"**{rate:,.0f} tokens/s** on each GPU in an optimised loop ({low:,.0f} to {high:,.0f}).")
    lines += [f"*{note}*" for note in dict.fromkeys((*memory.notes, *speed.notes))]
    return "\n\n".join(lines), rows, command("config.json" if config.strip() else name, setup)


def command(model: str, setup: TrainingSetup) -> str:
    """The command that searches the fastest setting of this training, and writes it."""
    words = ["hf-fsdp", "search", model, "--gpu", str(setup.gpu), "--num-processes", str(setup.num_processes)]
    words += ["--max-length", str(setup.max_length)]
    plain, own = asdict(TrainingSetup()), asdict(setup)
    for name, option in OPTIONS.items():
        if own[name] != plain[name]:
            words += [option] if own[name] is True else [option, str(own[name])]
    return shlex.join([*words, "--output", "run.yaml"])


def page() -> Any:
    """The page."""
    import gradio as gr

    with gr.Blocks(title="Will it fit?") as blocks:
        gr.Markdown("# Will it fit?\nMemory and speed of a fine-tune under PyTorch FSDP, from the config alone.")
        with gr.Row():
            with gr.Column():
                model = gr.Textbox("Qwen/Qwen3-8B", label="Model on the hub")
                config = gr.Textbox("", label="or its config.json", lines=3, max_lines=8, placeholder="{ … }")
                with gr.Row():
                    gpu = gr.Dropdown(list(GPUS), value="h100-80gb", label="GPU")
                    gpus = gr.Textbox("8", label="GPUs")
                with gr.Row():
                    length = gr.Textbox("4096", label="Tokens per row")
                    batch = gr.Textbox("1", label="Rows per GPU")
                method = gr.Radio(list(METHODS), value="LoRA", label="What is trained")
                checkpointing = gr.Checkbox(True, label="Activation checkpointing")
                button = gr.Button("Estimate", variant="primary")
            with gr.Column():
                verdict = gr.Markdown("")
                table = gr.Dataframe(headers=["memory at the peak", "GB"], type="array", interactive=False)
                start = gr.Code("", language="shell", label="Search the fastest setting, and write it")
        asked = [model, config, gpu, gpus, length, batch, method, checkpointing]
        button.click(answer, asked, [verdict, table, start], api_name="estimate", concurrency_limit=2)
    return blocks


if __name__ == "__main__":
    page().queue(max_size=20).launch()
