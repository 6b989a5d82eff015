"""The steps of `benchmarks/gpu.sh`, as data: which programs each part runs, and how their output becomes figures."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.gpu import reading
from benchmarks.gpu.record import Done, Outcome

__all__ = ["MODEL_GB", "STEPS", "Part", "Settings", "parts"]

STEPS = {
    1: "versions, nvidia-smi, hf-fsdp doctor",
    2: "tests marked gpu",
    3: "contexts: each rank on its own GPU alone (2 GPUs or more)",
    4: "loading, warm and cold, and saving, beside the limit of the machine and transformers",
    5: "the recipe, and short runs: CPU offload, fp16, whole parameters, LoRA, QLoRA",
    6: "LoRA at 8 B beside its peers; full fine-tuning and LoRA at 1 to 8 B, compiled too, beside plain transformers",
    7: "peak memory of one rank of 8 and of 64 against prediction",
    8: "two GPUs: the same training as on one, saving, resuming",
}

_LOADERS = ("limit", "hf_fsdp_tools", "transformers from_pretrained(device_map)")
_SAVERS = ("limit", "hf_fsdp_tools", "hf_fsdp_tools, blocking=False, again", "transformers save_pretrained")


MODEL_GB = {"demo": 0.01, "1b": 2.5, "4b": 8.1, "8b": 16.1}
"""What each checkpoint of `benchmarks.gpu.models` takes on the disk."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run has at hand."""

    scratch: Path
    """A folder of its own, removed at the end."""

    out: Path = Path("benchmarks/results")
    """Where what is kept goes."""

    small: bool = False
    """Tiny sizes, to try the programs."""

    gpus: int = 0
    """Of this machine."""

    gpu_gb: float = 0.0
    """Memory of the smallest of them."""

    def model(self, name: str) -> str:
        """Where a checkpoint is, or will be made."""
        return str(self.scratch / name)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some programs, one after the other, and what is to be read from what they leave."""

    step: int
    """Of `STEPS`."""

    name: str
    """Unique within its step."""

    programs: dict[str, list[str]]
    """Command lines by name. `{result}` stands for a file for JSON, `{files}` for a folder."""

    read: Callable[[dict[str, Done]], Outcome]
    """Figures of what they left; called if any program did its work."""

    limit_s: int
    """For all programs together."""

    gpus: int = 1
    """How many it needs."""

    gpu_gb: float = 0.0
    """Memory of each that it needs; of no account with small sizes."""

    models: tuple[str, ...] = ()
    """Checkpoints that it needs."""

    packages: tuple[str, ...] = ()
    """Python packages that it needs."""

    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment."""

    codes: tuple[int, ...] = (0,)
    """Exit codes that are no failure; with others than 0, what is read tells."""


def parts(settings: Settings) -> list[Part]:
    """All parts, in their order: what may fail comes first, then the figures that everybody asks for."""
    return [
        *_about(),
        *_contexts(settings),
        *_recipe(settings),
        *_short_runs(settings),
        *_training(settings),
        _prediction(settings),
        *_loading(settings),
        *_saving(settings),
        *_two_gpus(settings),
    ]


def _module(name: str, *arguments: str, ranks: int = 1) -> list[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    return [sys.executable, "-m", *launcher, name, *arguments]


def _about() -> list[Part]:
    doctor = "import sys; from hf_fsdp_tools.cli.main import main; sys.exit(main(['doctor']))"
    tests = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-rfE", "--tb=short"]
    return [
        Part(
            step=1,
            name="hf-fsdp doctor",
            programs={"doctor": [sys.executable, "-c", doctor]},
            read=reading.doctor,
            limit_s=180,
            gpus=0,
        ),
        Part(
            step=2,
            name="pytest -m gpu",
            programs={"tests": _module("pytest", *tests, "--junitxml", "{files}/tests.xml", "tests")},
            read=reading.tests,
            limit_s=480,
            packages=("pytest",),
            codes=(0, 1),
        ),
    ]


def _contexts(settings: Settings) -> list[Part]:
    ranks = max(2, settings.gpus)
    program = _module("benchmarks.gpu.contexts", settings.model("demo"), "{result}", ranks=ranks)
    return [
        Part(
            step=3,
            name="contexts",
            programs={"contexts": program},
            read=reading.contexts,
            limit_s=180,
            gpus=2,
            models=("demo",),
        )
    ]


def _loading(settings: Settings) -> list[Part]:
    def load(name: str, model: str, *options: str, loaders: Sequence[str] = _LOADERS, gpus: int = 1) -> Part:
        command = [sys.executable, "benchmarks/load.py", "--device", "cuda", "--checkpoint", settings.model(model)]
        command += ["--records", "{files}/load.jsonl", "--folder", str(settings.scratch / "load"), *options]
        return Part(
            step=4,
            name=name,
            programs={"load": [*command, "--loaders", *loaders]},
            read=reading.loading,
            limit_s=240,
            gpus=gpus,
            models=(model,),
        )

    def stored(cache: str, runs: int, ranks: int = 1) -> list[str]:
        few = ["--cache", cache, "--runs", "1" if settings.small else str(runs), "--ranks", str(ranks)]
        return [*few, "--dtype", "stored", "--unchecked"]

    several = [f"{name}, {n} reads in flight" for n in (4, 8, 16) for name in _LOADERS[:2]]
    compared = ["--cache", "warm", "--runs", "1", "--ranks", "1"]
    everywhere = max(2, settings.gpus)
    return [
        load("1 GPU, every value compared, 1B", "1b", *compared),
        load("1 GPU, page cache, 8B", "8b", *stored("warm", 3)),
        load("1 GPU, page cache, 8B, 4, 8 and 16 reads in flight", "8b", *stored("warm", 2), loaders=several),
        load("1 GPU, cold, 4B", "4b", *stored("cold", 2)),
        load("all GPUs, page cache, 8B", "8b", *stored("warm", 2, everywhere), gpus=2),
        Part(
            step=4,
            name="ten loads, 1B",
            programs={"loads": _module("benchmarks.gpu.repeated", settings.model("1b"), "{result}")},
            read=reading.repeated,
            limit_s=120,
            models=("1b",),
        ),
    ]


def _saving(settings: Settings) -> list[Part]:
    command = [sys.executable, "benchmarks/save.py", "--device", "cuda", "--checkpoint", settings.model("1b")]
    command += ["--records", "{files}/save.jsonl", "--folder", str(settings.scratch / "save"), "--ranks", "1"]
    command += ["--cache", "cold", "--dtype", "stored", "--runs", "1" if settings.small else "2"]
    return [
        Part(
            step=4,
            name="saving, 1 GPU, 1B",
            programs={"save": [*command, "--savers", *_SAVERS]},
            read=reading.saving,
            limit_s=240,
            models=("1b",),
        )
    ]


def _recipe(settings: Settings) -> list[Part]:
    steps = ["--max_steps", "8" if settings.small else "100"]
    peft = ["--use_peft", "--lora_target_modules", "all-linear"]

    def recipe(name: str, *options: str, launch: Sequence[str] = (), precision: str = "bf16") -> Part:
        command = _module("accelerate.commands.launch", "--config_file", "accelerate_configs/1x80gb.yaml", *launch)
        command += ["--num_processes", str(max(1, settings.gpus)), "--mixed_precision", precision]
        command += ["recipes/finetune.py", "--output_dir", "{files}/recipe", *steps, *options]
        needs = {"--use_peft": "peft", "--load_in_4bit": "bitsandbytes"}
        return Part(
            step=5,
            name=f"recipe, {name}",
            programs={"recipe": command},
            read=reading.recipe,
            limit_s=180,
            packages=("trl", "datasets", *(needs[option] for option in options if option in needs)),
        )

    return [
        recipe("quick start in bf16"),
        recipe("CPU offload", launch=("--fsdp_offload_params", "true")),
        recipe("fp16", precision="fp16"),
        recipe("LoRA", *peft),
        recipe("QLoRA", *peft, "--load_in_4bit"),
    ]


def _train(model: str, *options: str, plain: bool = False, ranks: int = 1) -> list[str]:
    kind = ("--plain",) if plain else ()
    files = ("--folder", model, "--result", "{result}")
    return _module("benchmarks.gpu.train", *kind, *files, *options, ranks=ranks)


def _pair(settings: Settings, model: str, shared: Sequence[str], ours: Sequence[str] = (), *, adapter: bool) -> Part:
    """The same training by plain transformers and by this package."""
    folder = settings.model(model)
    more = ["--adapter", f"{folder}-adapter"] if adapter else []
    weights = [] if adapter else ["--dtype", "float32"]  # masters, which ours has by itself
    return Part(
        step=6,
        name=model,
        programs={
            "plain": _train(folder, *shared, *more, *weights, plain=True),
            "ours": _train(folder, *shared, *more, *ours),
        },
        read=reading.trained_pair,
        limit_s=240,
        models=(model,),
        packages=("peft",) if adapter else (),
    )


def _short_runs(settings: Settings) -> list[Part]:
    sizes = ["--steps", "4", "--rows", "2", "--length", "32"] if settings.small else ["--steps", "12"]

    def short(name: str, ours: str = "", shared: str = "--precision bf16", adapter: bool = False) -> Part:
        pair = _pair(settings, "demo", [*shared.split(), *sizes], ours.split(), adapter=adapter)
        return replace(pair, step=5, name=f"short run, {name}", read=reading.short_pair, limit_s=150)

    norms = "--whole model.norm model.layers.*.input_layernorm"
    segments = replace(short("expandable segments"), variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    four_bit = short("QLoRA", shared="--precision bf16 --four-bit", adapter=True)
    return [
        short("bf16"),
        short("CPU offload", "--offload"),
        short("fp16", shared="--precision fp16"),
        short("whole norms", norms),
        short("whole MLPs, fp32", "--whole model.layers.*.mlp", shared="--precision no"),
        short("CPU offload and whole norms", f"--offload {norms}"),
        segments,
        short("LoRA", adapter=True),
        replace(four_bit, packages=("peft", "bitsandbytes")),
    ]


def _training(settings: Settings) -> list[Part]:
    tiny = ["--steps", "6", "--rows", "2", "--length", "32"]

    def train(name: str, model: str, rows: int, gpu_gb: float, *options: str, adapter: bool = False) -> Part:
        sizes = tiny if settings.small else ["--steps", "13", "--rows", str(rows), "--length", "2048"]
        pair = _pair(settings, model, [*sizes, "--learning-rate", "1e-4", *options], adapter=adapter)
        return replace(pair, name=name, gpu_gb=gpu_gb)

    # Memory (assumed): 16 bytes per parameter with fp32 masters and AdamW, 2 of a frozen base, the rest activations.
    tried = ["--tiny", "--steps", "6"] if settings.small else []
    beside = [sys.executable, "benchmarks/training.py", "--device", "cuda", "--ranks", "1", "--runs", "1", *tried]
    beside += ["--models", "8b", "--tuning", "lora", "--seq-len", "128" if settings.small else "4096"]
    beside += ["--folder", str(settings.scratch / "training"), "--records", "{files}/training.jsonl"]
    traced = [*(tiny if settings.small else ["--steps", "6", "--rows", "4", "--length", "2048"])]
    trace = _train(settings.model("1b"), *traced, "--trace", str(settings.out / "gpu-trace-1b.json.gz"))
    whole = Part(step=6, name="trace, 1B", programs={"ours": trace}, read=reading.trained_pair, limit_s=240)
    return [
        Part(
            step=6,
            name="LoRA, 8B, 4,096 tokens, beside its peers",
            programs={"training": beside},
            read=reading.peers,
            limit_s=900,
            gpu_gb=60,
            packages=("peft", "trl", "datasets"),
        ),
        train("LoRA, 8B, compiled", "8b", 2, 60, "--compile", adapter=True),
        train("full, 1B, fp32 masters, compiled", "1b", 4, 60, "--compile"),
        replace(whole, gpu_gb=60, models=("1b",)),
        train("full, 1B, fp32 masters", "1b", 4, 60),
        train("full, 4B, fp32 masters, activations recomputed", "4b", 2, 100, "--recompute"),
        train("LoRA, 1B", "1b", 4, 40, adapter=True),
        train("LoRA, 4B, activations recomputed", "4b", 4, 40, "--recompute", adapter=True),
        train("LoRA, 8B, activations recomputed", "8b", 4, 60, "--recompute", adapter=True),
    ]


def _prediction(settings: Settings) -> Part:
    cases = ("dense", "tied", "MoE", "LoRA", "checkpointing", "accumulation", "CPU offload")
    command = [sys.executable, "benchmarks/foresight.py", "memory", "--device", "cuda", "--gpus", "8", "64"]
    command += ["--size", "tiny" if settings.small else "middle", "--records", "{files}/memory.jsonl"]
    return Part(
        step=7,
        name="prediction",
        programs={"memory": [*command, "--cases", *cases]},
        read=reading.prediction,
        limit_s=600,
    )


def _two_gpus(settings: Settings) -> list[Part]:
    steps = ["--steps", "6", "--rows", "4", "--length", "32", "--precision", "no"]
    state, exported = str(settings.scratch / "state"), str(settings.scratch / "exported")

    def train(*options: str, ranks: int = 1) -> list[str]:
        return _train(settings.model("demo"), *steps, *options, ranks=ranks)

    def sharded(name: str, **programs: list[str]) -> Part:
        named = {key.replace("_", " "): command for key, command in {"one": train(), **programs}.items()}
        return Part(step=8, name=name, programs=named, read=reading.two_gpus, limit_s=240, gpus=2, models=("demo",))

    return [
        sharded(
            "parity, saving, resuming",
            two=train("--save", state, "--export", exported, ranks=2),
            resumed=train("--resume", state, ranks=2),
            resumed_on_one=train("--resume", state),
            opened=_train(exported, *steps, plain=True),
        ),
        sharded("CPU offload", two=train("--offload", ranks=2)),
        sharded("whole norms", two=train("--whole", "model.norm", ranks=2)),
    ]
