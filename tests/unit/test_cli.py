"""`hf-fsdp`: what is printed can be read by people and programs, and a mistake is one message with its cure."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from accelerate.commands.launch import launch_command_parser

import hf_fsdp_tools
from hf_fsdp_tools import LaunchConfig
from hf_fsdp_tools.cli import launch
from hf_fsdp_tools.cli.main import _parser
from hf_fsdp_tools.steps import WrapPlan
from tests._checkpoints import make_checkpoint
from tests._dist import imitate_gpus
from tests.api import GPUS, main


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


@pytest.fixture
def on_cpu(monkeypatch):
    imitate_gpus(monkeypatch, 0)


def says(**fields):
    return yaml.safe_load(LaunchConfig(**fields).to_accelerate_yaml())


def run(capsys, *words):
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("words", [("estimate", "--help"), ("embed", "--help")])
def test_help_imports_nothing_heavy(words):
    code = (
        "import sys\nfrom hf_fsdp_tools.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "print(sorted({'torch', 'transformers', 'accelerate', 'huggingface_hub', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "usage: hf-fsdp" in done.stdout
    assert done.stderr == ""
    if words[0] == "embed":  # its own options, those of the package, its columns
        assert re.search(r"--temperature +By which cosines [^-]*default: +0.05", done.stdout)
        assert "--merge_adapters" in done.stdout and "sentence-transformers" in done.stdout
        first = re.findall(r"^  --(\w+)", done.stdout.partition("options of this recipe")[2], re.MULTILINE)[:5]
        assert first == ["model_name_or_path", "dataset_name", "max_length", "learning_rate", "output_dir"]
        assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cp_size 2", "--cp_size goes into the launch file: `hf-fsdp init --output FILE` writes one"),
        ("--config config.json", "--config config.json is a model's config.json, and no YAML"),
        ("--config none.yaml", "--config none.yaml: there is no such file"),
        (
            "--config key.yaml",
            "--config key.yaml: lerning_rate is no option of this recipe: did you mean learning_rate?",
        ),
    ],
)
def test_a_wrong_option_of_a_recipe_is_said_before_its_libraries_are_imported(words, message, tmp_path):
    texts = {
        "config.json": '{\n "model_type": "llama"\n}',
        "key.yaml": "lerning_rate: 1",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    code = "import sys; from hf_fsdp_tools.cli import options; options.FIRST_S = 600.0\n"
    code += "from hf_fsdp_tools.cli.main import main; code = main(['finetune', *sys.argv[1:]])\n"
    code += "print(code, sorted({'torch', 'transformers', 'accelerate', 'trl'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "1 []\n" and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "predict memory, step time"),
        (["estimat"], "'estimat' is no command: did you mean estimate?"),
        (["merge", "base", "lora"], "`hf-fsdp export BASE OUT --adapter ADAPTER` merges an adapter"),
        (["plan"], "the following arguments are required: NAME"),
        (["estimate", "x", "--batch-size", "4"], "did you mean --per-device-train-batch-size?"),
        (["estimate", "x", "--recipe", "sft"], "argument --recipe: 'sft' is no recipe: did you mean finetune?"),
        (["init", "--num_processes=0"], "argument --num-processes: '0' is no whole number from 1"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown and ("usage" in shown) == (not words), "of twenty lines, where nothing was asked"


def test_help_has_every_command_once_with_examples_that_parse():
    parser = _parser()
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction)).choices
    own = {name for name, each in commands.items() if name == each.prog.split()[-1]}
    listed = re.findall(r"^  ([a-z][\w-]*) {2,}[a-z]", parser.epilog, re.MULTILINE)
    assert sorted(listed) == sorted(own) and {"gpus", "finetune", "vision-language"} <= own
    examples = re.findall(
        r"^  hf-fsdp (.*)",
        "\n".join([parser.epilog, *(commands[n].epilog or "" for n in own)]).replace("\\\n", ""),
        re.MULTILINE,
    )
    assert len(examples) > 15
    for words in map(str.split, examples):
        options, rest = parser.parse_known_args(words)
        assert not rest or hasattr(options, "rest"), words
    tools = [each for name, each in commands.items() if name in own and each.get_default("rest") != []]
    assert all(each.epilog for each in tools)


def test_gpus_are_listed_with_the_figures_that_estimates_take(capsys):
    code, out, _ = run(capsys, "gpus", "h200")
    assert code == 0 and out.splitlines()[0].startswith("--gpu") and re.search(r"h200-141gb +\d+\.\d GiB", out)
    listed = json.loads(run(capsys, "gpus", "--json")[1])
    assert [each["name"] for each in listed] == [*GPUS]
    assert run(capsys, "gpus", "h1000")[0] == 1


def test_plan_prints_a_table_and_json_and_takes_options(capsys, llama, tmp_path):
    code, out, err = run(capsys, "plan", llama, "--blocks")
    assert (code, err) == (0, "")
    assert "(root)" in out and "LlamaDecoderLayer" in out and "largest gathered unit" in out
    blocks = json.loads(run(capsys, "plan", llama, "--blocks", "--json")[1])["blocks"]
    assert blocks["stacks"][0]["fqn"] == "model.layers" and blocks["stacks"][0]["class_names"] == ["LlamaDecoderLayer"]
    code, out, err = run(capsys, "plan", llama, "--json", "--output", tmp_path / "deep" / "plan.json")
    assert (code, err) == (0, "")
    plan = WrapPlan.from_json(out)
    assert plan.units[-1].modules == ("",)
    assert WrapPlan.from_json((tmp_path / "deep" / "plan.json").read_text()) == plan

    def plan(*words):
        code, out, err = run(capsys, "plan", llama, "--json", *words)
        assert (code, err) == (0, "")
        return WrapPlan.from_json(out)

    by_type = plan("--block-types", "LlamaMLP, LlamaAttention")
    assert any(unit.modules[0].endswith("mlp") for unit in by_type.units)


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("plan {tmp}/absent", "Give an existing local folder"),
        ("plan {tmp}/unknown", "nosuchtype"),
        ("plan {tmp}/of.gguf", "of.gguf is a GGUF file, and no model. Make a plain checkpoint of GGUF files once"),
        ("estimate {tmp}/gguf", "(found: q4.gguf). Make a plain checkpoint of GGUF files once: AutoModelForCausalLM"),
        ("verify {tmp}/rows.jsonl", "rows.jsonl is a dataset, and no model"),
        ("estimate llama3:8b", "'llama3:8b' is a name with a tag, of Ollama or of GGUF files"),
        ("plan https://huggingface.co/Qwen/Qwen3-8B", "is a page. Give the name on the hub: Qwen/Qwen3-8B"),
        (
            "estimate {bert} --recipe finetune",
            "is a BertForMaskedLM, which generates no text. Give a causal lang",
        ),
        ("estimate {llama} --gpu h100x8", "GPU 'h100x8' is not in the table; known are h100-80gb, h100-nvl, h100-96gb"),
        ("convert {tmp}/open.yaml", "open.yaml is neither YAML nor JSON, line 2: "),
        ("doctor --config_file {llama}/config.json", "config.json is a model's config.json, and no config of a launch"),
        ("search {llama} --num-processes 4", "what fits on the CPU is not known: leave {llama} out, or say for which"),
        ("plan {llama} --auto-class AutoModelForCausalML", "did you mean AutoModelForCausalLM"),
        ("plan {llama} --block-types LlamaDecoderLayr", "LlamaDecoderLayer"),
        ("plan {llama} --output {tmp}/unknown/config.json/plan.json", "config.json is a file, not a folder; name"),
        ("finetune --num_machines 2 --num_processes 4", "--num_machines 2: give --main_process_ip, the address of m"),
        ("estimate {llama} --images 5", "images=5: LlamaForCausalLM takes no images"),
        ("estimate {llama} --wrapping none --offload-params", "need FSDP; leave them or wrapping='none' out"),
        ("estimate {bert} --max-length 16384", "beyond the 64 positions"),
        ("estimate {llama} --load-in-4bit", "lora_r, such as 16"),
        ("search {llama}", "--gpu h100-80gb"),
        ("init --gpu h100-80gb", "say with --num-processes"),
        ("search --gpu h100-80gb --num-processes 8", "which model? `hf-fsdp init` writes a config for machines alone"),
        ("init --num-processes 3 --num-machines 2", "num_processes 3 counts all machines and is not a multiple"),
        ("doctor --config_file 8x80bg", "did you mean 8x80gb"),
        ("doctor {llama} --config_file {tmp}/absent", "not both"),
    ],
)
def test_mistakes_are_one_message(capsys, llama, tmp_path, on_cpu, words, cure):
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "nosuchtype"}')
    (tmp_path / "gguf").mkdir()
    (tmp_path / "bert").mkdir()
    transformers.BertConfig(
        hidden_size=24, max_position_embeddings=64, architectures=["BertForMaskedLM"]
    ).save_pretrained(tmp_path / "bert")
    for name in ("of.gguf", "gguf/q4.gguf"):
        (tmp_path / name).write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "open.yaml").write_text("a: 1\nb: [")
    names = {"tmp": tmp_path, "llama": llama, "bert": tmp_path / "bert"}
    code, out, err = run(capsys, *words.format(**names).split())
    assert (code, out) == (1, "")
    assert err.startswith("hf-fsdp: error: ") and cure.format(**names) in err and "Traceback" not in err


def test_a_hub_name_without_a_network_and_a_traceback_on_request(capsys, monkeypatch, tmp_path):
    """The hub cannot be reached in offline mode either, and that needs no waiting."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = run(capsys, "plan", "nobody/nothing")
    assert code == 1 and err.startswith("hf-fsdp: error: ") and len(err.splitlines()) == 1
    assert "nobody/nothing" in err and "give the folder" in err
    with pytest.raises(ValueError, match="No such folder"):
        main(["--traceback", "plan", str(tmp_path / "absent")])


def test_config_options_reach_the_file_which_is_written_once(capsys, on_cpu, tmp_path):
    path = tmp_path / "new" / "here.yaml"
    code, out, err = run(capsys, "init", "--output", path)
    assert (code, err) == (0, "")
    assert f"accelerate launch --config_file {path}" in out
    assert path.read_text().startswith(f"# Generated by: hf-fsdp init --output {path}\n")
    assert "here.yaml (a new folder)" in out
    assert run(capsys, "init", "--output", path)[0] == 0, "the same again"
    path.write_text("distributed_type: NO\n")
    code, _, err = run(capsys, "init", "--output", path)
    assert code == 1 and "--force writes over it, --output names another" in err
    assert path.read_text() == "distributed_type: NO\n"
    assert run(capsys, "init", "--output", path, "--force")[0] == 0
    assert yaml.safe_load(path.read_text()) == says(num_processes=2, use_cpu=True)


def test_config_describes_this_machine_or_another(capsys, on_cpu, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert "--num_cpu_threads_per_process 4 your_script.py" in run(capsys, "init")[2]
    words = "init --gpu h100-80gb --num_processes 4 --num_machines 2 --machine-rank 1"
    _, out, err = run(capsys, *words.split(), "--main-process-ip", "a")
    assert "--machine_rank 1 your_script.py" in err and yaml.safe_load(out)["main_process_port"] == 29500
    assert "--machine_rank 1 --main_process_ip ADDRESS your_script.py" in run(capsys, *words.split())[2]
    assert "FSDP_EP_SIZE=4 accelerate launch " in run(capsys, *words.split(), "--ep-size", "4")[2]
    imitate_gpus(monkeypatch, 0)
    err = run(capsys, "init")[2]
    assert "this machine has no GPU" in err and "accelerate launch --config_file FILE" in err
    imitate_gpus(monkeypatch, 4)
    code, out, err = run(capsys, "init")
    assert code == 0 and yaml.safe_load(out) == says(num_processes=4, mixed_precision="bf16")
    assert "this machine has 4 GPUs" in err and "one for each GPU" in err
    code, _, err = run(capsys, "init", "--num-processes", "8")
    assert code == 1 and "say with --gpu for which other machine the file is" in err
    assert run(capsys, "init", "--num-processes", "8", "--gpu", "h100-80gb")[0] == 0
    assert run(capsys, "init", "--num-processes", "2")[0] == 0


def test_sigint_to_the_command_alone_ends_what_it_has_started():
    script = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(20)"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    try:
        assert launch._run([sys.executable, "-c", script]) == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_doctor_of_this_machine_a_model_and_a_config(capsys, llama, tmp_path, on_cpu, patch_inner):
    code, out, err = run(capsys, "doctor", llama, "--num-processes", "3")
    assert (code, err) == (0, "")
    assert "model.layers.{0..1}  LlamaDecoderLayer  2 × " in out and "no findings" in out
    report = json.loads(run(capsys, "doctor", llama, "--json")[1])
    (root,) = report["units"]["groups"]
    blocks = next(group for group in root["inside"] if group["modules"] == "model.layers.{0..1}")
    assert (blocks["count"], blocks["classes"], root["classes"]) == (2, ["LlamaDecoderLayer"], ["LlamaForCausalLM"])
    assert report["findings"] == []
    path = tmp_path / "mine.yaml"
    path.write_text(LaunchConfig(num_processes=2, use_cpu=True).to_accelerate_yaml())
    assert run(capsys, "doctor", "--config_file", path) == (0, f"{path}\n\nno findings\n", "")
    path.write_text(path.read_text().replace("fsdp_offload_params", "fsdp_offload_param"))
    code, out, err = run(capsys, "doctor", "--config-file", path)
    assert (code, err) == (1, "")
    assert "error: unknown-key\n    fsdp_offload_param: " in out and "did you mean fsdp_offload_params" in out
    value = json.loads(run(capsys, "doctor", "--config_file", path, "--json")[1])
    assert value["config_file"] == str(path) and [f["code"] for f in value["findings"]] == ["unknown-key"]
    assert run(capsys, "doctor", "--config_file", "8x80gb")[1].split("\n")[0].endswith("8x80gb.yaml")
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (0, "")
    assert f"torch            {torch.__version__.split('+')[0]}" in out and "gloo" in out
    assert json.loads(run(capsys, "doctor", "--json")[1])["versions"]["transformers"] == transformers.__version__
    declared = ["torch>=99.0", *(each for each in requires("hf_fsdp_tools") if not each.startswith("torch"))]
    patch_inner(requires=lambda name: declared)
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (1, "")
    assert "error: version-too-old" in out and 'pip install "torch>=99.0"' in out


def test_a_launch_warns_of_what_its_file_leaves_open(capsys, tmp_path, on_cpu, monkeypatch):
    launched: list[list[str]] = []
    monkeypatch.setattr(launch, "_run", lambda words: launched.append(words) or 0)
    path = tmp_path / "old.yaml"
    old = "distributed_type: FSDP\nmixed_precision: 'no'\nuse_cpu: true\ngpu_ids: ''\n"
    path.write_text(old + "fsdp_config: {fsdp_backward_prefetch: BACKWARD_POST}\n")
    code, _, err = run(capsys, "finetune", "--config_file", path)
    for warning in ("fsdp_version is absent", "Only FSDP1 has fsdp_backward_prefetch", "num_processes is absent"):
        assert f"warning: {path}: {warning}" in err
    assert code == 0 and str(path) in launched[0]
    assert "num_processes" not in run(capsys, "finetune", "--config_file", path, "--num_processes", "2")[2]
    path.write_text(LaunchConfig(num_processes=2, use_cpu=True).to_accelerate_yaml())
    assert run(capsys, "finetune", "--config_file", path)[2] == ""


REPOSITORY = Path(__file__).parents[2]


EIGHT = LaunchConfig(num_processes=8).to_accelerate_yaml()


def test_the_version(tmp_path):
    words = [sys.executable, "-m", "hf_fsdp_tools", "--version"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == f"hf-fsdp {hf_fsdp_tools.__version__}\n"


@pytest.fixture
def started(monkeypatch):
    commands = []

    def run(command):
        path = command[command.index("--config_file") + 1]
        commands.append((command, yaml.safe_load(Path(path).read_text())))
        return 7

    monkeypatch.setattr(launch, "_run", run)
    return commands


def test_a_recipe_is_launched_on_this_machine_or_with_a_config(started, monkeypatch, tmp_path):
    imitate_gpus(monkeypatch, 4)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run.yaml").write_text("max_steps: 3")
    own = ["--learning_rate", "-1e-5", "--use_peft", "--config", "my run.yaml", "--num_train", "3"]
    assert main(["finetune", *own]) == 7
    assert main(["finetune", *own, "--num_processes", "2"]) == 7
    assert main(["finetune", "--use_cpu", *own]) == 7
    (first, config), (_, two), (third, on_cpu) = started
    assert first[1] == "-m" and first[2].endswith(".accelerate_launch") and first[3] == "--config_file"
    assert first[-len(own) - 1 :] == [str(REPOSITORY / "recipes" / "finetune.py"), *own]
    assert config == says(num_processes=4, mixed_precision="bf16")
    assert two == says(num_processes=2, mixed_precision="bf16")
    assert third[-len(own) - 1] == "--use_cpu" and on_cpu == says(num_processes=2, use_cpu=True)
    assert not Path(first[4]).exists(), "a config made for one run goes with it"
    started.clear()
    imitate_gpus(monkeypatch, 8)
    path = tmp_path / "two.yaml"
    config = LaunchConfig(num_processes=16, num_machines=2, main_process_ip="a", main_process_port=1)
    path.write_text(config.to_accelerate_yaml())
    words = ["finetune", "--config_file", path, "--machine_rank", "1", "--main_process_ip", "node7", "--seed", "3"]
    assert main([*map(str, words)]) == 7
    command = started[0][0]
    assert command[3:] == [
        "--machine_rank", "1", "--main_process_ip", "node7", "--config_file", str(path),
        str(REPOSITORY / "recipes" / "finetune.py"), "--seed", "3",
    ]  # fmt: skip


def test_options_of_the_launcher_reach_it_and_not_the_recipe(started, monkeypatch, tmp_path, capsys):
    imitate_gpus(monkeypatch, 4)
    path = tmp_path / "four.yaml"
    path.write_text(LaunchConfig(num_processes=4).to_accelerate_yaml())
    threads = ["--num-cpu-threads-per-process", "3", "--fsdp_offload_params=true", "--seed", "3"]
    threads += ["--gradient_accumulation_steps", "2"]
    assert main(["finetune", "--mixed-precision", "fp16", "--gpu_ids", "0,1", "--num_processes", "2", *threads]) == 7
    assert main(["finetune", "--config_file", str(path), "--mixed_precision", "no", *threads]) == 7
    (made, config), (given, _) = started
    assert config == says(num_processes=2, mixed_precision="fp16", gpu_ids="0,1")
    recipe = [str(REPOSITORY / "recipes" / "finetune.py"), "--seed", "3", "--gradient_accumulation_steps", "2"]
    options = ["--mixed-precision", "fp16", "--gpu_ids", "0,1", "--num_processes", "2", *threads[:3]]
    assert made[3:-7] == options and made[-5:] == recipe
    assert given[3:6] == ["--mixed_precision", "no", threads[0]] and given[-5:] == recipe
    own = launch_command_parser().parse_args(made[3:])
    assert own.fsdp_offload_params == "true" and own.training_script_args == recipe[1:]
    capsys.readouterr()
    assert main(["finetune", "--use_deepspeed", "--seed", "3"]) == main(["dpo", "--dynamo_backend", "eager"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(started) == 2 and all("leave it out" in line for line in lines)


@pytest.mark.parametrize("name", ["cpu", "accelerate_configs/cpu.yaml"])
def test_a_config_of_the_package_is_found_by_name(started, monkeypatch, tmp_path, name):
    imitate_gpus(monkeypatch, 0)
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", "--config_file", name]) == 7
    assert started[0][0][4] == str(REPOSITORY / "accelerate_configs" / "cpu.yaml")


def test_a_preset_has_options_and_launch_of_its_recipe_on_its_gpus(started, monkeypatch, tmp_path, capsys):
    imitate_gpus(monkeypatch, 8, memory=85 * 10**9)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eight.yaml").write_text(LaunchConfig(num_processes=8).to_accelerate_yaml())
    (tmp_path / "mine").write_text("seed: 1\n")
    (tmp_path / "qwen3-8b").mkdir()  # shadows no name
    shipped = yaml.safe_load((REPOSITORY / "accelerate_configs" / "models" / "qwen3-8b.yaml").read_text())["options"]
    words = [word for name, value in shipped.items() for word in (f"--{name}", *[str(value)] * (value is not True))]
    assert main(["finetune", "--preset", "Qwen3-8B", "--seed", "3"]) == 7
    assert main(["finetune", "--preset=qwen3-8b", "--seed", "3", "--config_file", "eight.yaml"]) == 7
    assert main(["finetune", "--cpu", "--preset", "qwen3-8b", "--seed", "3"]) == 7
    assert main(["finetune", "--config", "mine"]) == 7
    capsys.readouterr()
    assert main(["finetune", "--config", "qwen3-8b", "--seed", "3"]) == 7
    assert "hf-fsdp: --config qwen3-8b is --preset qwen3-8b now\n" in capsys.readouterr().err
    (first, config), (second, of_eight), (third, on_cpu), (fourth, _), (fifth, same) = started
    assert config == same and config["num_processes"] == 8 and config["mixed_precision"] == "bf16"
    assert second[second.index("--config_file") + 1] == "eight.yaml" and on_cpu["use_cpu"] and of_eight != config
    for command in (first, second, third, fifth):
        assert command[-len(words) - 2 :] == [*words, "--seed", "3"]
    assert fourth[-2:] == ["--config", "mine"]


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("finetune --preset qwen3-9b", "none of the package: did you mean qwen3-"),
        ("finetune --preset qwen3-8b --num_processes 4", "is for 8 GPUs, not for --num_processes 4"),
        (
            "dpo --preset qwen3-8b",
            "--preset qwen3-8b is for finetune, and dpo takes other memory. Make one: hf-fsdp search Qwen/Qwen3-8B "
            "--recipe dpo --gpu h100-80gb --num-processes 8 --output FILE.yaml",
        ),
        (
            "finetune --preset qwen3-8b",
            "--preset qwen3-8b is for h100-80gb of 84.9 GB, and these GPUs have 42.0 GB. Make one: hf-fsdp search "
            "Qwen/Qwen3-8B --recipe finetune --num-processes 8 --output FILE.yaml",
        ),
        ("finetune --preset qwen3-8b --config mine", "--preset and --config: both have options of the recipe"),
        ("finetune --preset mine", "--preset mine is no preset ("),
        ("finetune --preset none.yaml", "--preset none.yaml is no preset ("),
        ("finetune --preset odd.yaml", "--preset odd.yaml is no preset (LaunchConfig.__init__() got an unexpected"),
        ("finetune --preset", "--preset names a file of `hf-fsdp search`, or a model"),
        ("finetune --config_file odd.yaml", "--config_file odd.yaml is a preset: --preset odd.yaml takes it"),
        ("finetune --config odd.yaml", "--config odd.yaml is a preset: --preset odd.yaml takes it"),
    ],
)
def test_a_preset_is_refused_where_it_was_not_searched_for(started, monkeypatch, tmp_path, capsys, words, cure):
    imitate_gpus(monkeypatch, 8, memory=42 * 10**9)
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("seed: 1\n")
    preset = {"recipe": "finetune", "gpu": "h100-80gb", "launch": {"num_procs": 8}, "options": {"seed": 1}}
    Path("odd.yaml").write_text(yaml.safe_dump(preset))
    assert main(words.split()) == 1 and not started
    said = capsys.readouterr().err
    assert cure in said and said.count("\n") == 1


def test_old_names_of_commands_go_on_with_a_line(capsys, on_cpu, tmp_path, llama):
    old, new = tmp_path / "old.json", tmp_path / "new.yaml"
    old.write_text('{"zero_optimization": {"stage": 3}}')
    for words, now in (
        ("config", "init"),
        (f"config --from {old} --num-processes 2 --output {new}", "convert"),
        (f"config --gpu h100-80gb {llama} --margin 2", "search"),
        (f"prove {tmp_path}/absent", "verify"),
    ):
        code, _, err = run(capsys, *words.split())
        assert err.startswith(f"hf-fsdp: `{words.split()[0]}` is `{now}` now\n"), err
        assert code == (now in ("search", "verify"))
    assert new.read_text().startswith(f"# Generated by: hf-fsdp convert {old} --num-processes 2 --output {new}\n")


@pytest.mark.parametrize(
    ("count", "text", "words", "cure"),
    [
        (4, None, "--num_processes 8", "4 GPU(s)"),
        (4, EIGHT, "--config_file own.yaml", "--num_processes 4"),
        (0, EIGHT, "--config_file own.yaml", "--cpu"),
        (
            4,
            None,
            "--config_file own.yaml",
            "there is no such file; `hf-fsdp init` makes one, and the package has 1x",
        ),
        (4, "distributed_type: MULTI_GPU\nnum_processes: 2\n", "--config_file own.yaml", "hf-fsdp convert"),
        (4, "distributed_type: FSDP\nnum_processes: 1\nnum_procs: 2\n", "--config_file own.yaml", "num_processes"),
    ],
)
def test_what_cannot_be_launched_is_not_started(started, monkeypatch, capsys, tmp_path, count, text, words, cure):
    monkeypatch.chdir(tmp_path)
    imitate_gpus(monkeypatch, count)
    Path("own.yaml").write_text(text) if text is not None else None
    assert main(["finetune", *words.split()]) == 1 and not started
    said = capsys.readouterr().err
    assert cure in said and (said.count("\n") == 1 or text not in (None, EIGHT))


ROOT = Path(__file__).parents[2]


def test_the_workflows_run_what_ci_run_knows_and_nothing_else() -> None:
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
    jobs = [job for workflow in workflows.values() for job in workflow["jobs"].values()]
    steps = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert sorted(steps) == ["bash .ci/run ${{ matrix.what }}", "bash .ci/run release"]
    script = (ROOT / ".ci/run").read_text()
    known = {word for line in re.findall(r"^([\w| ]+)\)", script, re.MULTILINE) for word in line.split(" | ")}
    chosen = re.findall(r'"(\w+)"', workflows["ci"]["jobs"]["run"]["strategy"]["matrix"]["what"])
    assert {"all", "nightly", "oldest", "newest"} <= set(chosen) <= known and "release" in known
    ended = subprocess.run(["bash", ROOT / ".ci/run", "nothing"], capture_output=True, text=True)
    assert ended.returncode == 2 and ".ci/run nightly" in ended.stdout
    at_night = script.partition("nightly)")[2].partition(";;")[0]
    assert "tests.machines today" in at_night and ".ci/wheel" in at_night
