"""What is estimated is what is run: options that `hf-fsdp search` prints, parsed by the recipe itself, make the setup
that was estimated; so do the files that the package has, and the commands of README."""

import json
import re
import runpy
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlavaConfig, T5Config, TrainingArguments

pytest.importorskip("trl")

import math

import pytest
import yaml

from hf_fsdp_tools import LaunchConfig, TrainingSetup
from hf_fsdp_tools.scripting import arguments, running
from tests._dist import imitate_gpus
from tests.api import RECIPES, Preset, recipe_words, recipes, setup_of
from tests.unit.test_cli import run


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    imitate_gpus(monkeypatch, 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = LlamaConfig(vocab_size=512, max_position_embeddings=1024, **sizes)
    llama.save_pretrained(folder / "llama")
    t5 = T5Config(d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, vocab_size=512, decoder_start_token_id=0)
    t5.save_pretrained(folder / "t5")
    tower = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes}
    LlavaConfig(text_config=llama, vision_config=tower, image_token_index=511).save_pretrained(folder / "llava")
    return {"seq2seq": folder / "t5", "vision-language": folder / "llava"}, folder / "llama"


def parsed(recipe: str, words: list[str], monkeypatch: Any, world_size: int) -> tuple[Any, ...]:
    """The arguments that a recipe makes of a command line."""

    class ParsedError(Exception):
        pass

    def noted(*kinds: Any, **options: Any) -> None:
        raise ParsedError(*parse(*kinds, **options))

    parse = arguments.parse_arguments
    on_cpu = ["--use_cpu", "true"] * (recipe != "accelerate-loop")
    with monkeypatch.context() as patched, pytest.raises(ParsedError) as found:
        patched.setattr(arguments, "parse_arguments", noted)
        patched.setattr(running, "parse_arguments", noted)
        patched.setattr(TrainingArguments, "world_size", property(lambda _: world_size))  # GRPO counts with it
        patched.setattr(sys, "argv", [recipe, *words, *on_cpu])
        runpy.run_path(str(recipes()[recipe.replace("-", "_")]))["main"]()
    return found.value.args


def machine_of(config: LaunchConfig, **known: Any) -> dict[str, Any]:
    names: tuple[str, ...] = ("dp_replicate_size", "cp_size", "tp_size", "ep_size", "sequence_parallel")
    names += ("reshard_after_forward", "activation_checkpointing")
    names += tuple(f"activation_checkpointing_{name}" for name in ("every_n_layers", "offload", "save_ops"))
    values = {name: getattr(config, name) for name in (*names, "offload_params")}
    nodes = {"gpus_per_node": config.num_processes // config.num_machines, "num_processes": config.num_processes}
    return values | nodes | {"mixed_precision": config.mixed_precision} | known


FIXED = "--gpu h100-80gb --num-processes 2 --max-length 512 --no-offload-params --reshard-after-forward"
FIXED += " --dp-replicate-size 1 --cp-size 1 --tp-size 1 --ep-size 1 --activation-checkpointing"
FIXED += " --activation-checkpointing-every-n-layers 2 --no-activation-checkpointing-offload"
FIXED += " --activation-checkpointing-save-ops attention"
FIXED += " --gradient-accumulation-steps 3 --per-device-train-batch-size 5"
OF_LORA = "--lora-r 8 --lora-dropout 0.1 --lora-target-modules q_proj,v_proj --attn-implementation eager"
OF_LORA += " --sync-each-batch --no-torch-compile"
OF_ALL = "--optimizer sgd_momentum --no-sync-each-batch --torch-compile --master-dtype bf16"


SOME = [("finetune", False), ("finetune", True), ("accelerate-loop", False), ("accelerate-loop", True)]
SOME += [(recipe, True) for recipe in RECIPES if recipe not in dict(SOME)]
MORE = [pytest.param(recipe, False, marks=pytest.mark.nightly) for recipe in RECIPES if (recipe, False) not in SOME]


@pytest.mark.parametrize(("recipe", "adapter"), [*SOME, *MORE])
def test_what_is_estimated_is_what_is_run(recipe, adapter, models, capsys, tmp_path, monkeypatch):
    """By words, and with an adapter by a preset."""
    others, llama = models
    model, path = others.get(recipe, llama), tmp_path / "two.yaml"
    words = [*FIXED.split(), *(OF_LORA if adapter else OF_ALL * (recipe != "accelerate-loop")).split()]
    words += ["--frozen-models", str(llama)] * (recipe in ("distill", "grpo"))
    words = [word.replace("q_proj,v_proj", "q,v") if recipe == "seq2seq" else word for word in words]
    words += ["--output", str(path)] * adapter
    code, out, err = run(capsys, "search", model, "--recipe", recipe, *words, "--json")
    if recipe == "accelerate-loop" and adapter:
        assert code == 1 and "--lora-r does not go with --recipe accelerate-loop;" in err
        return
    assert code == 0, err
    value = json.loads(out)
    found, launched = value["recommendation"]["setup"], shlex.split(value["launch"])
    start = launched.index(recipe)
    assert launched[start + 1] == ("--preset" if adapter else "--config_file")
    lists = {"activation_checkpointing_save_ops": ("attention",), "transformer_layer_cls_to_wrap": ()}
    config = LaunchConfig(**{**value["config"], **lists})
    if adapter:
        assert LaunchConfig(**Preset.read(path).launch) == config
        launched[start + 1 : start + 3] = recipe_words(Preset.read(path).options)
        start -= 2
    taken = parsed(recipe, launched[start + 3 :], monkeypatch, 2)
    own = setup_of(recipe, *taken, **machine_of(config, gpu="h100-80gb"))
    assert own.loss in (None, found["loss"])
    assert json.loads(json.dumps(asdict(replace(own, loss=found["loss"])), default=str)) == found
    words = words[: -2 * adapter or None]
    estimated = json.loads(run(capsys, "estimate", model, "--recipe", recipe, *words, "--json")[1])
    assert estimated["memory"]["total"] == value["recommendation"]["cost"]["peak_bytes"]
    assert {**estimated["memory"]["setup"], "gpus_per_node": 2, "policy": found["policy"]} == found


def told(path: Path) -> dict[str, Any]:
    """What the header of a file says of the setup that was estimated."""
    text = re.sub(r"\n# {10,}", " ", path.read_text())
    words = re.search(r"^# assumed +(.*)$", text, re.MULTILINE).group(1)
    rows = re.search(
        r"^# batch +(\d+) = \d+ [^x]+ x (\d+) x (\d+) accumulation steps, ([\d,]+) tokens(?:: .*)?$",
        text,
        re.MULTILINE,
    )
    head = r"^# (\S+), sequences of ([\d,]+) tokens, on \d+ x (\S+)$"
    model, max_length, gpu = re.search(head, text, re.MULTILINE).groups()
    total, batch, steps, tokens = (int(number.replace(",", "")) for number in rows.groups())
    max_length = int(max_length.replace(",", ""))
    assert total * max_length == tokens
    return {"words": words, "batch": (batch, steps, total), "max_length": max_length, "gpu": gpu, "model": model}


def run_by(path: Path, recipe: str, words: list[str], monkeypatch: Any, gpu: str) -> TrainingSetup:
    """The setup of a recipe that is started with a launch file, or a preset, and these words."""
    if path in MODELS:
        preset = Preset.read(path)
        config, words = LaunchConfig(**preset.launch), [*recipe_words(preset.options), *words]
        assert (preset.recipe, preset.gpu) == (recipe, gpu)
    else:
        config = LaunchConfig(**LaunchConfig.translate_file(path).fields)
    setup = setup_of(recipe, *parsed(recipe, words, monkeypatch, config.num_processes), **machine_of(config, gpu=gpu))
    return replace(setup, loss="chunked")


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "accelerate-loop"])
def test_an_adapter_has_its_learning_rate_unless_one_is_given(recipe, models, capsys, monkeypatch, tmp_path):
    """That of the table, which `hf-fsdp search` writes too; also said in the help."""
    words = ["--model_name_or_path", str(models[1]), "--dataset_name", "x", "--output_dir", str(tmp_path)]
    rates = [
        next(
            each.learning_rate
            for each in parsed(recipe, [*words, *more], monkeypatch, 8)
            if hasattr(each, "output_dir")
        )
        for more in (["--use_peft"], ["--use_peft", "--learning_rate", "3e-5"], [])
    ]
    assert rates[:2] == [RECIPES[recipe].rates[True], 3e-5] and rates[2] not in rates[:1]
    said = " ".join(run(capsys, recipe, "--help")[1].split())
    assert re.search(rf"--use_peft .*learning rate {rates[0]:g} unless", said) and "--ema_decay" in said
    assert "--streams_are_shares" not in said


REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "accelerate_configs"
SHIPPED = sorted(path for path in FOLDER.glob("*.yaml") if path.stem != "here")
"""Without the file that a reader of the documents writes."""
MODELS = sorted((FOLDER / "models").glob("*.yaml"))


def header(path: Path) -> dict[str, str]:
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#")]
    return dict(re.split(r": |  +", line, maxsplit=1) for line in lines if re.search(r": |  ", line.strip()))


FILES = [*(path for path in SHIPPED if path.stem != "cpu"), *MODELS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_is_run_as_it_was_estimated(path, monkeypatch):
    """The line that starts it, parsed by the recipe, and what the file says of its estimate."""
    monkeypatch.chdir(FOLDER.parent)
    said, words = told(path), shlex.split(header(path)["Start it with"])
    words = words[words.index("hf-fsdp") + 1 :]
    recipe, option, name, *rest = (word for word in words if word not in ("--machine_rank", "0"))
    assert Path(name).samefile(path) and option == ("--preset" if path in MODELS else "--config_file")
    rest = [word for word in rest if word not in ("--main_process_ip", "ADDRESS")]
    setup = run_by(path, recipe, rest, monkeypatch, said["gpu"])
    batch = (setup.per_device_train_batch_size, setup.gradient_accumulation_steps)
    assert (*batch, batch[0] * batch[1] * setup.rows_at_once) == said["batch"]
    assert (setup.max_length, setup.words) == (said["max_length"], said["words"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_file_says_how_it_is_made_and_started_and_means_what_it_says(path: Path, monkeypatch: Any) -> None:
    imitate_gpus(monkeypatch, 0)
    comment, data = header(path), yaml.safe_load(path.read_text())
    assert comment["Generated by"].endswith(f"--output accelerate_configs/{path.name}")
    assert f"--config_file accelerate_configs/{path.name} " in comment["Start it with"]
    assert data["fsdp_config"]["fsdp_version"] == 2 and not data["fsdp_config"]["fsdp_offload_params"]
    assert not [each for each in LaunchConfig.check_file(path) if each.severity == "error"]
    if path.stem != "cpu":
        assert data["num_processes"] == math.prod(int(number) for number in path.stem.split("x")[:-1])
        assert re.search(r"\d GB of \d+\.\d GB per GPU", comment["memory"]) and "tokens/s per GPU" in comment["speed"]


@pytest.mark.parametrize("name", ["cpu", pytest.param("1x24gb", marks=pytest.mark.nightly)])
def test_what_is_shipped_is_what_is_made_today(name: str, monkeypatch: Any, capsys: Any) -> None:
    """By the script that writes the files, which prints how they differ; of one searched file and the simplest."""
    imitate_gpus(monkeypatch, 0)
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    monkeypatch.setattr(sys, "argv", ["make_configs.py", "--check", name])
    from make_configs import main as make_configs

    assert (make_configs(), capsys.readouterr().out) == (0, "1 files, 0 different\n")
