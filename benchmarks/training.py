"""Train with `recipes/finetune.py` and with what others ship, in one run, on the same data and the same machine.

    python benchmarks/training.py                                            # CPU: 2 ranks, a small model
    python benchmarks/training.py --device cuda --models 1b 8b --records training.jsonl            # one GPU or more
    python benchmarks/training.py --models tiny --steps 5 --runs 1           # to try the script

hf_fsdp_tools              `recipes/finetune.py` under a file of `hf-fsdp init`
TRL                        TRL's own `trl/scripts/sft.py` under the `fsdp2.yaml` that TRL ships. In a world of one
                           Accelerate drops FSDP, and on CPUs too: there it is started by torchrun, and is plain DDP
TRL, chunked loss          the same with `--loss_type chunked_nll`, which our recipe takes by itself
transformers native        TRL's SFTTrainer on `from_pretrained(distributed_config=DistributedConfig(fsdp_size=…))`

Each begins from the same checkpoint (random weights in the shape of real models), trains the same rows in the same
order with AdamW, one row of 512 tokens (on GPUs 4,096) per rank and step, and takes TRL's defaults for the rest. `full`
has fp32 master weights under bf16 mixed precision on GPUs and fp32 on CPUs; `lora` a frozen bf16 base (fp32 on CPUs)
and rank 16 on all linear layers. Contestants take turns in processes of their own, started by `accelerate launch`; the
scripts run as they are, with one callback more.

tokens/s       per rank, by the median step, after the first four
÷ ours         median, over rounds, of their step time over ours in the same round
peak           `torch.cuda.max_memory_allocated` during training, and what the allocator reserved; on CPUs the most that
               was resident of the process, whole
ready          seconds from the first import to the first step, the load included
losses         of the first and the last step: the same data in the same order gives nearly the same
"""

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loading.models import make_checkpoint
from benchmarks.measuring import OURS, Page, Row, about, add_page_options, in_turn, parsed_with_ranks, ratio, table_of
from hf_fsdp_tools.scripting.demo import make_demo_model
from hf_fsdp_tools.testing import run_ranks

ROOT = Path(__file__).resolve().parents[1]
TRL_FOLDER = Path(str(distribution("trl").locate_file("trl")))
SCRIPT = "benchmarks/training.py"
TRL, CHUNKED, NATIVE = "TRL", "TRL, chunked loss", "transformers native"
CONTESTANTS = (OURS, TRL, CHUNKED, NATIVE)
LIMIT_S = 600
_WARM_UP = 4  # steps that are not timed
SMALL: dict[str, Any] = {"hidden_size": 384, "num_layers": 8, "vocab_size": 8192}
TINY: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "vocab_size": 512}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=["tiny", "small", "1b", "8b"], help="small on CPUs, 1b on GPUs")
    parser.add_argument("--tuning", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--steps", type=int, default=12, help="of which the first four are not timed")
    add_page_options(parser, "hf_fsdp_tools-training")
    args = parsed_with_ranks(parser)
    on_gpu, args.folder = args.device == "cuda", args.folder.resolve()  # trainings run in folders of their own
    args.models = args.models or (["1b"] if on_gpu else ["small"])
    args.seq_len = 64 if args.models == ["tiny"] else 4096 if on_gpu else 512
    return args


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One measured cell after another."""
    for model in args.models:
        folder = checkpoint(model, args)
        data = dataset(args, folder)
        for tuning in args.tuning:
            cell = {"model": model, "tuning": tuning, "seq_len": args.seq_len}
            cell |= {"ranks": args.ranks, "device": args.device}
            rows: dict[str, Row] = {}
            for name in in_turn(CONTESTANTS, args.runs):
                if "failed" in rows.get(name, {}):
                    continue
                row = rows.setdefault(name, {"seconds": []})
                row |= one(name, cell, folder, data, args)
                row["seconds"] += [row["step"]] if "failed" not in row else []
            shown = {name: rows[name] for name in CONTESTANTS}
            yield {"cell": cell, "rows": shown, "about": about(SCRIPT, args.device)}


def checkpoint(model: str, args: argparse.Namespace) -> Path:
    """A folder with weights and the demo's tokenizer."""
    folder: Path = args.folder / model
    if sizes := {"small": SMALL, "tiny": TINY}.get(model):
        return make_demo_model(folder, max_length=max(1024, args.seq_len), max_shard_size="1GB", **sizes)
    if not folder.is_dir():
        run_ranks(make_checkpoint, 1, model, 0, folder, timeout_s=900)
        tokenizer = make_demo_model(args.folder / "tokenizer")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (tokenizer / name).is_file():
                shutil.copy(tokenizer / name, folder)
    return folder


def dataset(args: argparse.Namespace, folder: Path) -> Path:
    """Rows of text that are all longer than the sequence, so that every row is cut to the same number of tokens."""
    from transformers import AutoTokenizer

    from hf_fsdp_tools.scripting.demo import demo_passages

    path = args.folder / f"text-{folder.name}-{args.seq_len}"
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    passages = [(text, len(tokenizer(text)["input_ids"])) for _, text in demo_passages()]
    endless = itertools.cycle(passages)
    with (path / "train.jsonl").open("w") as stream:
        for row in range(args.ranks * (args.steps + 2)):
            texts, length = [f"Row {row}."], 0
            while length < args.seq_len + 16:
                text, tokens = next(endless)
                texts, length = [*texts, text], length + tokens
            stream.write(json.dumps({"text": "\n\n".join(texts)}) + "\n")
    shutil.copy(path / "train.jsonl", path / "test.jsonl")  # or the recipe holds out some of the rows
    return path


def one(name: str, cell: dict[str, Any], model: Path, data: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One training by one contestant: its figures, or why it failed."""
    of_trl = str(TRL_FOLDER / "scripts" / "sft.py")
    script = {OURS: str(ROOT / "recipes" / "finetune.py"), NATIVE: "native"}.get(name, of_trl)
    with tempfile.TemporaryDirectory() as folder:
        words = [*launch(name, cell, Path(folder)), folder, script, *options(name, cell, args)]
        words += ["--model_name_or_path", str(model), "--dataset_name", str(data)]
        words += ["--output_dir", str(Path(folder, "out"))]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        visible = {"CUDA_VISIBLE_DEVICES": ""} if cell["device"] == "cpu" else {}
        variables = {**os.environ, **visible, "PYTHONPATH": paths, "HF_HOME": str(args.folder / "hf")}
        try:
            done = subprocess.run(
                words, env=variables, cwd=folder, timeout=LIMIT_S, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {LIMIT_S} s"}
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("[0-9]*.json"))]
    if len(ranks) < cell["ranks"]:
        lines = re.sub(r"^\[rank\d+\]: ", "", done.stderr, flags=re.MULTILINE).splitlines()
        errors = [line for line in lines if line.split(":")[0].split(".")[-1].endswith("Error")]
        told = [line for line in errors if "CalledProcessError" not in line and "ChildFailed" not in line]
        return {"failed": [done.stderr[-160:].replace("\n", " "), *told][-1][:200].replace("|", "/")}
    steps = [max(times) for times in zip(*(rank["steps"] for rank in ranks), strict=True)]
    return {
        "step": statistics.median(steps[_WARM_UP:]),
        "peak": max(rank["peak"] for rank in ranks),
        "reserved": max(rank["reserved"] for rank in ranks),
        "ready": max(rank["ready"] for rank in ranks),
        "losses": [ranks[0]["losses"][0], ranks[0]["losses"][-1]],
        "sharded": ranks[0]["shards"],
        "tokens": cell["seq_len"],
    }


def launch(name: str, cell: dict[str, Any], folder: Path) -> list[str]:
    """The launcher under the contestant's own config file."""
    precision = "bf16" if cell["device"] == "cuda" else "no"
    words = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", str(cell["ranks"])]
    if name != OURS and cell["device"] == "cpu":
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell["ranks"])]
    elif name == OURS:
        config = folder / "ours.yaml"
        making = ["--num-processes", str(cell["ranks"]), "--mixed-precision", precision, "--output", str(config)]
        making += ["--cpu"] if cell["device"] == "cpu" else []
        program = "import sys; from hf_fsdp_tools.cli.main import main; sys.exit(main(sys.argv[1:]))"
        subprocess.run([sys.executable, "-c", program, "init", *making], check=True, cwd=ROOT, capture_output=True)
        words += ["--config_file", str(config)]
    elif name == NATIVE:
        words += ["--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", precision]
        words += ["--multi_gpu"] if cell["ranks"] > 1 else []
    else:
        shipped = TRL_FOLDER / "accelerate_configs" / "fsdp2.yaml"
        words += ["--config_file", str(shipped), "--mixed_precision", precision]
    return [*words, "-m", "benchmarks.tuning"]


def options(name: str, cell: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """What all contestants are told, and what only some take from the command line."""
    on_cpu = cell["device"] == "cpu"
    told = {"max_steps": args.steps, "max_length": cell["seq_len"], "per_device_train_batch_size": 1}
    told |= {"logging_steps": 1, "save_strategy": "no", "eval_strategy": "no", "report_to": "none", "seed": 7}
    told |= {"learning_rate": 1e-4, "disable_tqdm": "true", "shuffle_dataset": "false"}
    if cell["tuning"] == "lora":
        told |= {"lora_r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
    if name != OURS:  # which reads these from the config file, and keeps a frozen base as it is stored
        told |= {"gradient_checkpointing": "false", "bf16": str(not on_cpu).lower()}
        told |= {"dtype": "bfloat16" if cell["tuning"] == "lora" and not on_cpu else "float32"}
        told |= {"use_cpu": str(on_cpu).lower()}
    if name == CHUNKED:
        told["loss_type"] = "chunked_nll"
    words = [word for key, value in told.items() for word in (f"--{key}", str(value))]
    return [*words, *(["--use_peft"] if cell["tuning"] == "lora" else [])]


# ---- the page ----


def title_of(cell: dict[str, Any]) -> str:
    ranks = f"{cell['ranks']} rank{'s' if cell['ranks'] > 1 else ''} on {cell['device']}"
    how = {"full": "full fine-tuning", "lora": "LoRA"}[cell["tuning"]]
    return f"{cell['model']}, {how}, {cell['seq_len']:,} tokens, {ranks}"


def table(rows: dict[str, Row]) -> list[str]:
    columns = ["contestant", "step s: median (min–max)", "tokens/s per rank", "÷ ours", "peak GB", "reserved GB"]
    columns += ["ready s", "losses", "sharded"]
    return table_of(columns, [cells_of(name, row, rows) for name, row in rows.items()])


def cells_of(name: str, row: Row, rows: dict[str, Row]) -> list[str]:
    if "failed" in row:
        return [name, "fails", *[""] * 5, row["failed"], ""]
    took = row["seconds"]
    return [
        name,
        f"{statistics.median(took):.3f} ({min(took):.3f}–{max(took):.3f})",
        f"{row['tokens'] / statistics.median(took):,.0f}",
        ratio(rows, name, OURS),
        f"{row['peak'] / 1e9:.2f}",
        f"{row['reserved'] / 1e9:.2f}" if row["reserved"] else "",
        f"{row['ready']:.0f}",
        " → ".join(f"{loss:.3f}" for loss in row["losses"]),
        "yes" if row["sharded"] else "no",
    ]


PAGE = Page(title="Training", script=SCRIPT, title_of=title_of, table=table)


if __name__ == "__main__":
    PAGE.run(parsed(), cells)
