"""Write `docs/models/`, or compare: python docs/make_model_pages.py [--check]

A page for each checkpoint that `accelerate_configs/models/` has presets for, and a table of all model types. Sizes and
units come from the checkpoint's configuration (`models.py`), estimates from the head of the preset, and what is
verified from the certificates (`benchmarks/results/certificates_*.md`): small models of the same code on CPU ranks, of
the newest transformers with which one was made.
"""

import argparse
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import yaml
from models import CONFIGS
from paste import printed

from hf_fsdp_tools.axes import AXES
from hf_fsdp_tools.steps import build_meta_model
from hf_fsdp_tools.text import show_count

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "models"
PRESETS = ROOT / "accelerate_configs" / "models"
HEAD = {
    "batch": "batch",
    "memory": "memory, estimated",
    "speed": "speed, estimated",
    "next best": "next best",
    "too large": "does not fit",
    "note": "note",
}
"""Lines in the head of a preset, and how a page names them."""
DATASETS = {"finetune": "trl-lib/Capybara", "pretrain": "DATASET"}
ABOUT = """A small model of each type, made by the code of transformers 5.24 (Llama 4: 5.23), with images and sound
where it reads them, ran on 2 CPU ranks and in one process. ✓: both agree. *in bf16*: they differ in bf16 alone. –: it
has no such part, or none was tried."""


@cache
def certificates() -> tuple[list[str], dict[str, list[str]], dict[tuple[str, str], str]]:
    """What was compared, the marks of each type, and why one is refused or differs. The newest transformers counts with
    which a small model of a type was made."""
    columns: list[str] = []
    known: dict[str, list[str]] = {}
    why: dict[tuple[str, str], str] = {}
    files = (ROOT / "benchmarks" / "results").glob("certificates_*.md")
    for path in sorted(files, key=lambda path: int(path.stem.rpartition(".")[2])):
        tables = [
            [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part.splitlines()]
            for part in path.read_text(encoding="utf-8").split("\n\n")
            if part.startswith("|")
        ]
        _, ((_, *columns), _, *marks), (_, _, *reasons) = tables
        made = {name: of for name, *of in marks if name not in known or {*of[1:]} != {"–"}}
        known |= made
        why = {(name, column): reason for (name, column), reason in why.items() if name not in made}
        why |= {(name, column): r for name, _, of, r in reasons for column in of.split(", ") if name in made}
    return columns, known, why


def verified(model_type: str) -> str:
    """What of a type was compared with one process, as sentences."""
    columns, marks, why = certificates()
    of_mark: dict[str, list[str]] = defaultdict(list)
    for column, mark in zip(columns, marks[model_type], strict=True):
        of_mark[mark].append(column)
    agree = ", ".join(of_mark.pop("✓"))
    says = [f"A small model of type `{model_type}` on 2 CPU ranks agrees with one process in: {agree}."]
    if none := of_mark.pop("–", []):
        says.append(f"It has no part for, or none was tried of: {', '.join(none)}.")
    for mark, names in of_mark.items():
        says += [f"{column}: {mark} ({first_sentence(why[model_type, column])})." for column in names]
    return " ".join(says)


def first_sentence(text: str) -> str:
    """The first sentence of a reason, of at most 140 characters, that ends with a word."""
    first = re.split(r"(?<=[a-z)])[.;] ", re.sub(r"^hf_fsdp_tools\.errors\.\w+: ", "", text))[0]
    return first if len(first) <= 140 else first[:140].rpartition(" ")[0] + " …"


def facts(path: Path) -> dict[str, str]:
    """What the head of a preset says, by the first words of its lines; notes are joined."""
    found: dict[str, str] = {}
    label = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        label, words = line[2:12].strip() or label, line[12:]
        if label in HEAD:
            before = found.get(label, "")
            found[label] = f"{before}{' ' if before.endswith('.') else '; ' if before else ''}{words}"
    return found


def trained(options: dict[str, object], launch: dict[str, object]) -> str:
    """What a preset trains, and how."""
    parts = [f"LoRA, rank {options['lora_r']}" if options.get("use_peft") else "all parameters"]
    parts += ["base as stored"] * (options.get("dequantize") is False)
    parts += ["activation checkpointing"] * bool(launch.get("activation_checkpointing"))
    parts += ["compiled blocks"] * bool(options.get("torch_compile"))
    parts += [f"`{axis.size}` {launch[axis.size]}" for axis in AXES if axis.size in launch]
    return ", ".join(parts)


def page(model: str, presets: list[Path]) -> str:
    """The page of a checkpoint."""
    config = CONFIGS[model.rpartition("/")[2]]
    meta = build_meta_model(config)
    size = show_count(sum(parameter.numel() for parameter in meta.parameters()))
    plan = printed(f"hf-fsdp plan {model}")
    lines = [
        f"# {model.rpartition('/')[2]}",
        "",
        f"`{model}` is a `{type(meta).__name__}` of {size} parameters. No preset was run on several GPUs: memory and",
        "speed are [estimates](../estimating.md#how-exact-it-is).",
    ]
    for path in presets:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        launch = found["launch"]
        lines += [
            "",
            "```bash",
            f"hf-fsdp {found['recipe']} --preset {path.stem} --dataset_name {DATASETS[found['recipe']]}",
            "```",
            "",
            f"| Preset | `{path.stem}` |",
            "| --- | --- |",
            f"| GPUs | {launch['num_processes']} × {found['gpu']} |",
            f"| trained | {trained(found['options'], launch)} |",
            f"| sequences | {found['options']['max_length']:,} tokens |",
            *(f"| {HEAD[label]} | {words} |" for label, words in facts(path).items()),
        ]
    lines += [
        "",
        "On other GPUs, with another recipe or longer sequences, search again:",
        "",
        "```bash",
        f"hf-fsdp search {model} --gpu a100-80gb --num-processes 4 --recipe dpo --output mine.yaml",
        f"hf-fsdp estimate {model} --gpu rtx-4090 --lora-r 16 --activation-checkpointing",
        "```",
        "",
        "## FSDP units",
        "",
        "```text",
        *plan,
        "```",
        "",
        "## Verified",
        "",
        verified(config.model_type),
        "",
    ]
    return "\n".join(lines)


def index(pages: dict[str, list[Path]]) -> str:
    """The presets, and the table of all types."""
    columns, marks, _ = certificates()
    lines = [
        "# Models",
        "",
        "## Presets",
        "",
        "`--preset NAME` of a recipe takes one of these, found by `hf-fsdp search` for cards of 80 GB. Its model's",
        "page has the command, the settings, what does not fit, and what was verified.",
        "",
        "| `--preset` | Model | GPUs | Tokens | Trained | Memory of a GPU, estimated |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model, presets in pages.items():
        for path in presets:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
            memory, _, _ = facts(path)["memory"].partition(" of")
            cells = [f"`{path.stem}`", f"[{model}]({presets[0].stem}.md)", str(found["launch"]["num_processes"])]
            cells.append(f"{found['options']['max_length']:,}")
            lines.append(f"| {' | '.join([*cells, trained(found['options'], found['launch']), memory])} |")
    lines += [
        "",
        "## All model types",
        "",
        *ABOUT.splitlines(),
        "Why a type is refused or differs stands in [the certificates](../../benchmarks/results/certificates_5.24.md).",
        "",
        f"| type | {' | '.join(columns)} |",
        f"| --- |{' --- |' * len(columns)}",
        *(f"| {name} | {' | '.join(of)} |" for name, of in sorted(marks.items())),
        "",
        "```{toctree}",
        ":hidden:",
        *(presets[0].stem for presets in pages.values()),
        "```",
        "",
    ]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """The text of each page by its file's name."""
    by_model: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(PRESETS.glob("*.yaml"), key=lambda path: path.stem):
        by_model[yaml.safe_load(path.read_text(encoding="utf-8"))["options"]["model_name_or_path"]].append(path)
    texts = {f"{presets[0].stem}.md": page(model, presets) for model, presets in by_model.items()}
    return {"index.md": index(by_model), **texts}


def main() -> int:
    """Write the pages or compare them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    is_check = parser.parse_args().check
    made = pages()
    FOLDER.mkdir(exist_ok=True)
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    different = sorted(name for name in {*made, *there} if made.get(name) != there.get(name))
    for name in () if is_check else different:
        if name in made:
            (FOLDER / name).write_text(made[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    print(f"{len(made)} pages, {len(different)} different{': ' * bool(different)}{', '.join(different)}")
    return int(is_check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
