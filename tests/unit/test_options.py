"""No option is taken and ignored: given alone it changes what is computed, written or shown, or it is refused with the
place where it belongs; there it changes something."""

import argparse
import ast
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("trl")

from transformers import LlamaConfig

import hf_fsdp_tools
from hf_fsdp_tools import LaunchConfig
from hf_fsdp_tools.cli import estimate
from hf_fsdp_tools.cli import main as command
from tests._dist import imitate_gpus
from tests.api import Proof, SaveReport, recipes, recommend_config, rehearse
from tests.unit.test_cli import run

VALUES = {
    "--activation-checkpointing-save-ops": "matmul", "--attn-implementation": "eager", "--block-types": "LlamaMLP",
    "--auto-class": "AutoModelForSequenceClassification", "--config-file": "qwen3-32b", "--dequantize": "false",
    "--dtype": "bfloat16", "--frozen-models": "other", "--gpu": "a100-40gb", "--gpu-ids": "0,1", "--image-size": "64",
    "--images": "0", "--lora-dropout": "0.1", "--loss": "full", "--lora-target-modules": "q_proj", "--margin": "0.3",
    "--master-dtype": "bf16", "--mixed-precision": "fp16", "--main-process-ip": "10.0.0.1", "--machine-rank": "1",
    "--optimizer": "sgd", "--recipe": "dpo", "--reduce-dtype": "bf16", "--state-dict-type": "FULL_STATE_DICT",
    "--wrapping": "root", "--price": "2", "--tokens": "1e9", "--fsdp-version": "1",
}  # fmt: skip
"""Values for options that take no number."""

OWN_CODE = "--trust-remote-code"  # changes nothing for a model that has none

PLACES = {
    **dict.fromkeys(("--lora-dropout", "--lora-target-modules", "--load-in-4bit", "--dequantize"), "--lora-r 8"),
    **dict.fromkeys(("--slurm", "--skypilot", "--kubernetes", "--hf-jobs"), "--output {new}"),
    **dict.fromkeys(("every-n-layers", "offload", "save-ops"), "--activation-checkpointing"),
    "--price": "--tokens 1e9",
    "--tokens": "--price 2",
    "--machine-rank": "--num-machines 2",
    "--force": "--output {old}",
}
"""What an option needs beside it."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=64, max_position_embeddings=4096, **sizes).save_pretrained(folder)
    (folder / "cpu.yaml").write_text(LaunchConfig(num_processes=2, use_cpu=True).to_accelerate_yaml())
    return folder


BASES = {
    "init": "init --num-processes 2",
    "search": "search {llama} --gpu h100-80gb --num-processes 8",
    "convert": "convert {llama}/cpu.yaml",
    "estimate": "estimate {llama} --num-processes 8",
    "doctor": "doctor",
    "doctor NAME": "doctor {llama}",
    "plan": "plan {llama}",
    "export": "export {llama} {llama}",
    "verify": "verify {llama}",
}


parser = cache(command._parser)  # it reads every recipe


@pytest.mark.parametrize("base", BASES)
def test_no_option_is_taken_and_ignored(base, llama, capsys, tmp_path, monkeypatch, patch_inner):
    imitate_gpus(monkeypatch, 4 if base == "init" else 0)
    monkeypatch.setattr(command, "_parser", parser)
    seen, kept = [], {}

    def noted(of, make):
        def once(*words, **options):
            seen.append(repr((words[1:], {name: value for name, value in options.items() if name != "say"})))
            kept[of] = (of in ("search", "estimate") and kept.get(of)) or make(*words, **options)
            return kept[of]

        return once

    patch_inner(recommend_config=noted("search", recommend_config))
    monkeypatch.setattr(estimate, "_estimated", noted("estimate", estimate._estimated))
    patch_inner(rehearse=noted("doctor", rehearse))

    def proved(config, *words, **options):
        seen.append(config._attn_implementation)
        model, layout = {"class": "Llama", "parameters": 1, "inputs": ""}, dict.fromkeys(("fsdp_version", "adapter"), 2)
        layout["num_processes"] = 2
        row = {"check": "loss", "rows": "rows", "precision": "fp32", "difference": None, "problem": ""}
        return Proof(model=model, layout=layout, checks=[row], left_out={}, first_module="", versions={})

    exported = noted("export", lambda *_, **__: SaveReport(folder=f"{llama}"))
    monkeypatch.setattr(hf_fsdp_tools, "export_checkpoint", exported)
    patch_inner(prove=noted("verify", proved))
    patch_inner(device_title=lambda device: "NVIDIA H100 80GB HBM3")

    @cache
    def result(*words):
        seen.clear()
        old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
        for path in tmp_path.iterdir():
            path.unlink()
        old.write_text("another: file")
        text = BASES[base].format(llama=llama).split() + " ".join(words).format(old=old, new=new).split()
        try:
            code, out, err = run(capsys, *text)
        except SystemExit as usage:
            code, out, err = usage.code, *capsys.readouterr()
        files = {path.name: path.read_text() for path in tmp_path.iterdir()}
        lines = [line for line in (out + err).splitlines() if not line.startswith("# Generated by")]
        return code, (lines, files if "--output" not in words else sorted(files), list(seen)), err

    commands = next(each for each in parser()._actions if isinstance(each, argparse._SubParsersAction)).choices
    ignored = []
    for action in commands[base.split()[0]]._actions:
        for flag in sorted({each for each in action.option_strings if each.startswith("--")} - {"--help", OWN_CODE}):
            value = VALUES.get(flag) or ("{new}" if action.metavar == "FILE" else "3")
            place = PLACES.get(flag.removeprefix("--activation-checkpointing-"), PLACES.get(flag, ""))
            place = [place] if place else []
            words = flag if action.nargs == 0 else f"{flag} {value}"
            (before, old, _), (code, new, _) = result(*place), result(*place, words)
            alone, shown, said = result(words)
            is_default = isinstance(action, argparse.BooleanOptionalAction)  # one of the two says what holds anyway
            changes = (before and code) or (code, new) != (before, old)  # a place that is refused takes nothing
            if not is_default and (not changes or (not alone and shown == result()[1])):
                ignored.append(words)
            assert not alone or said, words
    assert not ignored


def test_each_option_of_a_recipe_is_read():
    """Its own, not TRL's, by the recipe, by what recipes share, or by the mixin."""
    scripting = Path(hf_fsdp_tools.__file__).parent / "scripting"
    mixin = scripting.parent / "integrations"
    shared = [ast.parse(path.read_text()) for folder in (scripting, mixin) for path in folder.glob("*.py")]
    for path in (*recipes().values(), scripting / "arguments.py", mixin / "trainer_settings.py"):
        tree = ast.parse(path.read_text())
        kinds = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.decorator_list]
        fields = [line for kind in kinds for line in kind.body if isinstance(line, ast.AnnAssign)]
        options = {line.target.id for line in fields if "init=False" not in ast.unparse(line)}
        nodes = [node for each in (tree, *shared) for node in ast.walk(each)]
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        read |= {node.value for node in nodes if isinstance(node, ast.Constant)}
        assert options - read == set(), path
