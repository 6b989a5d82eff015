"""`hf-fsdp estimate` and `config NAME`: what is printed is what the functions say, and a mistake is one
message with its cure."""

import json

import pytest
import yaml
from transformers import LlamaConfig

from hf_fsdp_tools import LaunchConfig, TrainingSetup, estimate_memory
from hf_fsdp_tools.foresight.recommend import SEARCHED
from tests._dist import imitate_gpus
from tests.api import MARGIN, show_bytes, throughput_of
from tests.unit.test_cli import run


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama-2b"
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2, "num_attention_heads": 64}
    config = LlamaConfig(vocab_size=32000, num_key_value_heads=64, max_position_embeddings=8192, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    imitate_gpus(monkeypatch, 0)


EIGHT = {"num_processes": 8, "max_length": 2048}
ON_EIGHT = ("--num-processes", "8", "--max-length", "2048")
DEGREES = {name: 1 for name in ("dp_replicate_size", "cp_size", "tp_size", "ep_size")}
ONE_COPY = " ".join(f"--{name.replace('_', '-')} 1" for name in DEGREES)
"""What a search need not try here: `test_recommend.py` shows the search."""


def test_estimate_prints_what_the_functions_say(capsys, llama):
    """With the figure of the other kind of loss, and a row for each of what takes most at the peak."""
    memory, whole = estimate_memory(llama, **EIGHT), estimate_memory(llama, loss="full", **EIGHT)
    time = throughput_of(memory)
    code, out, err = run(capsys, "estimate", llama, *ON_EIGHT, "--explain", "--tokens", "1e9", "--price", "2.5")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert words.startswith(" ".join(str(memory).split())) and " ".join(str(time).split()) in words
    assert f"{time.hours(1e9):,.1f} hours and cost {time.cost(1e9, 2.5):,.0f} at 2.5 per GPU hour" in out
    assert f"assumed: {memory.setup.words}" in words and "optimizer adamw" in memory.setup.words
    assert f"with full logits (--loss full) {show_bytes(whole.total)} in all" in words
    assert f"up to {show_bytes(round(memory.total * (1 + MARGIN)))} on a real GPU" in words
    before, _, explained = out.partition("largest at the peak")
    assert all(len(line) <= 100 for line in before.splitlines()[:-1])
    table, rows = explained.split("\n\n")[0].splitlines(), memory.largest(10**6)
    assert len(table) == 11 and rows[0][3] in table[1]
    assert ("model.layers.0", "input_layernorm aten._to_copy") in [row[2:] for row in rows]
    workspace = memory.at_peak["cuBLAS workspace"] + memory.at_peak["rounding"]
    assert sum(num_bytes for num_bytes, *_ in rows) == memory.peak_allocated - workspace
    value = json.loads(run(capsys, "estimate", llama, *ON_EIGHT, "--json")[1])
    assert value["memory"]["total"] == memory.total and value["throughput"]["mfu"] == time.mfu
    _, out, _ = run(capsys, "estimate", llama, *ON_EIGHT, "--gpu", "a100-40gb", "--per-device-train-batch-size", "16")
    assert "does not fit" in out and "what fits: with activation_checkpointing." in " ".join(out.split())


def test_what_config_recommends_keeps_what_is_asked_for_and_estimate_says_the_same_of_it(capsys, llama):
    words = "--gpu h100-80gb --no-reshard-after-forward --per-device-train-batch-size 2 --mixed-precision fp16 --json"
    words += f" --no-offload-params {ONE_COPY}"
    value = json.loads(run(capsys, "search", llama, *ON_EIGHT, *words.split())[1])
    found, setup = value["recommendation"], value["recommendation"]["setup"]
    assert (setup["per_device_train_batch_size"], setup["mixed_precision"]) == (2, "fp16")
    assert not value["config"]["reshard_after_forward"] and not setup["reshard_after_forward"]
    assert value["launch"].startswith("hf-fsdp finetune --config_file FILE ")
    assert "fits, " in found["next_best"]
    chosen = {name: setup[name] for name in (*SEARCHED, "mixed_precision")}
    memory = estimate_memory(llama, TrainingSetup(num_processes=8, max_length=2048, **chosen))
    assert memory.setup.loss == setup["loss"] == "chunked" and memory.total == found["cost"]["peak_bytes"]
    time = throughput_of(memory)
    assert time.step_seconds == pytest.approx(found["cost"]["step_seconds"])
    assert "with a Trainer, packed rows 88% to 103% of it, padded rows 62% to 88% of it" in value["yaml"]


def test_every_option_reaches_the_setup(capsys, llama):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 has it")
    options = {
        "--num-processes 16 --num-machines 4": {"num_processes": 16, "gpus_per_node": 4},
        "--gpu a100-40gb --network-gbit-s 400": {"gpu": "a100-40gb", "network_gbit_s": 400},
        "--link-gb-s 20 --dp-replicate-size 2": {"link_gb_s": 20, "dp_replicate_size": 2},
        "--cp-size 2 --tp-size 2": {"cp_size": 2, "tp_size": 2},
        "--per-device-train-batch-size 2 --max-length 512": {"per_device_train_batch_size": 2, "max_length": 512},
        "--gradient-accumulation-steps 3": {"gradient_accumulation_steps": 3},
        "--no-sync-each-batch --mixed-precision fp16": {"sync_each_batch": False, "mixed_precision": "fp16"},
        "--reduce-dtype fp16": {"reduce_dtype": "fp16"},
        "--optimizer sgd --lora-r 4": {"optimizer": "sgd", "lora_r": 4},
        "--lora-target-modules q_proj,v_proj": {"lora_target_modules": ["q_proj", "v_proj"]},
        "--activation-checkpointing": {"activation_checkpointing": True},
        "--no-reshard-after-forward --offload-params": {"reshard_after_forward": False, "offload_params": True},
        "--loss full --torch-compile": {"loss": "full", "compile": True},
        "--attn-implementation eager": {"attn_implementation": "eager"},
    }
    setup = json.loads(run(capsys, "estimate", llama, *" ".join(options).split(), "--json")[1])["memory"]["setup"]
    for words, fields in options.items():
        assert {name: setup[name] for name in fields} == fields, words


def write_fp8(llama, folder, block=128):
    content = json.loads((llama / "config.json").read_text()) | {"vocab_size": 512}
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(content))


def test_a_base_stays_quantised_where_it_is_asked_for(capsys, llama, tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 has it")
    code, _, err = run(capsys, "estimate", llama, *ON_EIGHT, "--lora-r", "8", "--dequantize", "false")
    assert code == 1 and "the configuration of LlamaForCausalLM has no quantization_config" in err
    code, _, err = run(capsys, "estimate", llama, *ON_EIGHT, "--dequantize", "false")
    assert code == 1 and "dequantize=False freezes the base" in err
    write_fp8(llama, tmp_path)
    words = ["--lora-r", "8", "--dequantize", "false"]
    value = json.loads(run(capsys, "estimate", tmp_path, *ON_EIGHT, *words, "--json")[1])["memory"]
    assert not value["setup"]["dequantize"] and value["num_params"] == pytest.approx(2.0e9, rel=0.05)
    _, out, _ = run(capsys, "estimate", tmp_path, *ON_EIGHT, *words)
    assert "lora_r 8" in out and "without dequantize" in " ".join(out.split())
    shared = json.loads(run(capsys, "estimate", tmp_path, *ON_EIGHT, *words, "--tp-size", "2", "--json")[1])["memory"]
    assert shared["num_params"] == value["num_params"] and shared["total"] < value["total"]
    write_fp8(llama, tmp_path, 2048)
    code, _, err = run(capsys, "estimate", tmp_path, *ON_EIGHT, *words, "--tp-size", "8")
    assert code == 1 and "is stored in blocks of 2048, through which 8 parts of its" in err, err


def test_config_writes_what_is_recommended(capsys, llama, tmp_path):
    path = tmp_path / "run.yaml"
    words = "--gpu rtx-4090 --num-processes 2 --max-length 1024 --per-device-train-batch-size 2 --global-batch-size 8"
    words += f" --no-reshard-after-forward --activation-checkpointing --optimizer adamw {ONE_COPY}"
    code, out, err = run(capsys, "search", llama, *words.split(), "--output", path)
    assert (code, err) == (0, "")
    written = yaml.safe_load(path.read_text())["fsdp_config"]
    assert written["fsdp_offload_params"] is written["fsdp_activation_checkpointing"] is True
    assert written["fsdp_reshard_after_forward"] is False
    comment = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    assert comment[0].startswith(f"Generated by: hf-fsdp search {llama} --gpu rtx-4090")
    assert [finding.code for finding in LaunchConfig.check_file(path)] == ["few-devices"]  # it is for another machine
    command = out.splitlines()[-1].removeprefix("launch").strip()
    assert f"hf-fsdp finetune --config_file {path} --model_name_or_path {llama} " in command
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 " in f"{command} "
    assert comment[2] == f"Start it with: {command}"


def test_config_looks_at_this_machine(capsys, llama, monkeypatch, patch_inner):
    imitate_gpus(monkeypatch, 4)
    patch_inner(device_title=lambda device: "NVIDIA H100 80GB HBM3")
    words = ["--per-device-train-batch-size", "1", "--activation-checkpointing", "--no-reshard-after-forward", "--json"]
    words += ["--no-offload-params", *ONE_COPY.split()]
    value = json.loads(run(capsys, "search", llama, *words)[1])
    setup = value["recommendation"]["setup"]
    assert (setup["gpu"], setup["num_processes"], value["config"]["num_processes"]) == ("h100-80gb", 4, 4)
    patch_inner(device_title=lambda device: "Abacus 3000")
    code, _, err = run(capsys, "search", llama)
    assert code == 1 and "'Abacus 3000' is not in the table" in err
