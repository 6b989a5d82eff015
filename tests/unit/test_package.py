"""What is installed: recipes and configs are in the wheel, and `hf-fsdp NAME` starts a recipe as a user expects."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

import hf_fsdp_tools
from hf_fsdp_tools import LaunchConfig
from hf_fsdp_tools.cli import launch
from tests._dist import imitate_gpus
from tests.api import main
from tests.unit.test_cli import says

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_installs_and_starts(kind, tmp_path):
    pytest.importorskip("hatchling", reason="building needs its backend")
    code = f"import hatchling.build; print(hatchling.build.build_{kind}({str(tmp_path)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    file, target = tmp_path / built.stdout.split()[-1], tmp_path / "installed"
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(file)], check=True)
    environment = os.environ | {"PYTHONPATH": str(target)}
    words = [sys.executable, "-P", "-m", "hf_fsdp_tools", "finetune", "--help"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert "--merge_adapters" in done.stdout and "fine-tune" in done.stdout.lower()
    code = "import hf_fsdp_tools; print(hf_fsdp_tools.__file__)"
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()).is_relative_to(target)


EIGHT = LaunchConfig(num_processes=8).to_accelerate_yaml()
MAIN = "from hf_fsdp_tools.cli.main import main; main()"


@pytest.mark.parametrize("program", [["-m", "hf_fsdp_tools"], ["-c", MAIN]])
def test_the_version(program, tmp_path):
    words = [sys.executable, *program, "--version"]
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


def test_the_options_for_a_model_are_found_by_name_with_their_launch_file(started, monkeypatch, tmp_path, capsys):
    imitate_gpus(monkeypatch, 8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eight.yaml").write_text(LaunchConfig(num_processes=8).to_accelerate_yaml())
    (tmp_path / "mine").write_text("seed: 1\n")
    folder = REPOSITORY / "accelerate_configs" / "models"
    run = ["--config", str(folder / "qwen3-8b.run.yaml"), "--seed", "3"]
    assert main(["finetune", "--config", "Qwen3-8B", "--seed", "3"]) == 7
    assert main(["finetune", "--config=qwen3-8b", "--seed", "3", "--config_file", "eight.yaml"]) == 7
    assert main(["finetune", "--cpu", "--config", "qwen3-8b", "--seed", "3"]) == 7
    assert main(["finetune", "--config", "mine"]) == 7
    (first, config), (second, _), (third, on_cpu), (fourth, _) = started
    assert first[first.index("--config_file") + 1] == str(folder / "qwen3-8b.yaml") and config["num_processes"] == 8
    assert second[second.index("--config_file") + 1] == "eight.yaml" and on_cpu["use_cpu"]
    assert first[-4:] == second[-4:] == third[-4:] == run and fourth[-2:] == ["--config", "mine"]
    assert main(["finetune", "--config", "qwen3-9b"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no model of the package: did you mean qwen3-" in error and "gpt-oss-20b, llama-3.1-8b" in error
    assert main(["finetune", "--config", "qwen3-8b", "--num_processes", "4"]) == 1
    assert "estimated for 8 GPUs, not for --num_processes 4" in capsys.readouterr().err


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
            "there is no such file; `hf-fsdp config` makes one, and the package has 1x",
        ),
        (4, "distributed_type: MULTI_GPU\nnum_processes: 2\n", "--config_file own.yaml", "hf-fsdp config --from"),
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


PACKAGE = Path(__file__).parents[2] / "hf_fsdp_tools"
SAYS = {
    "hf_fsdp_tools.from_pretrained": 'Revealed type is "def (name_or_path: ',
    "hf_fsdp_tools.build_meta_model": 'Module has no attribute "build_meta_model"',
    "scripting.run": 'Revealed type is "def (',
    "scripting.build_meta_model": 'Module has no attribute "build_meta_model"',
    "steps.build_meta_model": 'Revealed type is "def (',
    "steps.from_pretrained": 'Module has no attribute "from_pretrained"',
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of a script, a line for each name; it looks into the modules of these names alone."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("mypy")
    lines = ["import hf_fsdp_tools", "from hf_fsdp_tools import scripting, steps", *(f"reveal_type({x})" for x in SAYS)]
    (folder / "script.py").write_text("\n".join(lines) + "\n")
    (folder / "mypy.ini").write_text("[mypy]\nfollow_imports = skip\nignore_missing_imports = true\n")
    names = ("__init__", "steps", "pretrained", "scripting/__init__", "scripting/running", "modeling/meta")
    files = [folder / "script.py", *(PACKAGE / f"{name}.py" for name in names)]
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache")]
    words = [sys.executable, "-m", "mypy", *options, *map(str, files)]
    done = subprocess.run(words, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", SAYS)
def test_a_type_checker_knows_the_names_of_the_front_doors_and_no_others(checked: list[str], name: str) -> None:
    at = f"script.py:{[*SAYS].index(name) + 3}:"
    said = [line for line in checked if at in line]
    assert any(SAYS[name] in line for line in said), checked
    assert ("error" in "".join(said)) == SAYS[name].startswith("Module"), said


ROOT = Path(__file__).parents[2]
BOUNDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_workflow_runs_what_ci_run_knows_and_nothing_else() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps == ["bash .ci/run ${{ matrix.what }}"]
    script = (ROOT / ".ci/run").read_text()
    known = {word for line in re.findall(r"^([\w| ]+)\)", script, re.MULTILINE) for word in line.split(" | ")}
    chosen = re.findall(r'"(\w+)"', workflow["jobs"]["run"]["strategy"]["matrix"]["what"])
    assert {"all", "nightly", "oldest", "newest"} <= set(chosen) <= known
    ended = subprocess.run(["bash", ROOT / ".ci/run", "nothing"], capture_output=True, text=True)
    assert ended.returncode == 2 and ".ci/run nightly" in ended.stdout
    assert "tests.machines today" in script.partition("nightly)")[2].partition(";;")[0]


def test_documents_name_the_lower_bounds() -> None:
    least = dict(re.findall(r"^(\w+)>=(\d+\.\d+)", "\n".join(BOUNDS["dependencies"]), re.MULTILINE))
    for name, torch, transformers in (
        ("README.md", r"torch (\S+) and", r"transformers (\S+) are the oldest"),
        ("CHANGELOG.md", r"It needs torch (\S+),", r"transformers (\S+) and"),
        ("docs/guide.md", r"Needed are torch from (\S+),", r"transformers from (\S+) and"),
    ):
        text = (ROOT / name).read_text()
        found = [match[1] if (match := re.search(pattern, text)) else None for pattern in (torch, transformers)]
        assert found == [least["torch"], least["transformers"]], name
