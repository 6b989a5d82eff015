"""Files beside a launch file that start it elsewhere: each starts what it says, with the user's arguments."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_fsdp_tools import LaunchConfig
from tests._dist import imitate_gpus
from tests.api import main

FOLDER = Path(__file__).parents[2] / "accelerate_configs"
FOUR = ["--gpu", "h100-80gb", "--num-processes", "4"]
SIXTEEN = ["--gpu", "h100-80gb", "--num-processes", "16"]
OWN = ["--dataset_name", "my data", "--seed", "3"]
"""Arguments that a user gives to the script when a job is started."""

STUBS = {
    "srun": 'while [ "$1" != bash ]; do shift; done; SLURM_NODEID=1 "$@"',
    "scontrol": '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"',
    "getent": '[ "$1" = hosts ]',
    "hf-fsdp": 'printf "%s\\n" "$@" "HF_HOME=$HF_HOME"',
    "accelerate": 'printf "%s\\n" "$@"',
    "hf": 'printf "%s\\n" "$@"; while [ "$1" != image ]; do shift; done; printf -- "---\\n"; "${@:2}"; cat launch.yaml',
}
"""What stands for programs of a cluster, and for launchers: they say what they were given."""


def started(folder: Path, *words: str, **variables: str) -> list[str]:
    """What bash starts with these words, word by word, where the stubs stand for all other programs."""
    for stub, body in STUBS.items():
        (folder / stub).write_text(f"#!/bin/bash\n{body}\n")
        (folder / stub).chmod(0o755)
    variables |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", *words], env=variables, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: Any) -> None:
    imitate_gpus(monkeypatch, 0)


def written(path: Path, suffix: str, *words: str) -> str:
    assert main(["init", *words, "--output", str(path)]) == 0
    return path.with_suffix(suffix).read_text()


def test_a_batch_script_starts_a_launcher_on_each_machine(tmp_path: Path, capsys: Any) -> None:
    script = FOLDER / "2x8x80gb.sbatch"
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41234", "SLURM_CPUS_PER_TASK": "64"}
    *words, home = started(tmp_path, str(script), *OWN, SLURM_SUBMIT_DIR=str(tmp_path), **job)
    place = ["--machine_rank", "1", "--main_process_ip", "node7", "--main_process_port", str(20000 + 41234 % 20000)]
    assert words[:9] == ["finetune", "--config_file", "accelerate_configs/2x8x80gb.yaml", *place]
    assert words[-4:] == OWN and home == f"HF_HOME={tmp_path}/hf-home"
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8"} <= set(script.read_text().splitlines())
    path = tmp_path / "it's here.yaml"
    text = written(path, ".sbatch", *FOUR, "--slurm")
    assert "it's here.sbatch" in capsys.readouterr().out
    assert "MAIN_ADDRESS" not in text and "--gpus-per-node=4" in text and "--nodes=1" in text
    words = started(tmp_path, str(path.with_suffix(".sbatch")), SLURM_SUBMIT_DIR="/", SLURM_CPUS_PER_TASK="1")
    assert words == ["launch", "--config_file", str(path), "your_script.py"]


def test_a_task_of_skypilot(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "two: here.yaml"
    task = yaml.safe_load(written(path, ".sky.yaml", *SIXTEEN, "--skypilot"))
    assert f"launch  sky launch '{path.with_suffix('.sky.yaml')}'" in capsys.readouterr().out
    assert (task["resources"], task["num_nodes"]) == ({"accelerators": "H100:8"}, 2)
    assert task["name"] == "train-two-here" and task["envs"] == {"PACKAGE": ".", "ARGS": ""} and task["volumes"]
    (mounted,) = (remote for remote, local in task["file_mounts"].items() if local == str(path))
    machine = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NODE_RANK": "1", "ARGS": shlex.join(OWN)}
    words = started(tmp_path, "-c", task["run"], **machine)
    place = ["--machine_rank", "1", "--main_process_ip", "10.0.0.7", "--main_process_port", "29500"]
    assert words == ["launch", "--config_file", mounted, *place, "your_script.py", *OWN]
    task = yaml.safe_load(written(tmp_path / "one.yaml", ".sky.yaml", *FOUR, "--skypilot"))
    assert task["resources"] == {"accelerators": "H100:4"} and task["num_nodes"] == 1 and "volumes" not in task
    words = started(tmp_path, "-c", task["run"], ARGS="", SKYPILOT_NODE_IPS="10.0.0.7")
    assert words == ["launch", "--config_file", "/tmp/hf-fsdp/one.yaml", "your_script.py"]
    task = yaml.safe_load(written(tmp_path / "cpu.yaml", ".sky.yaml", "--cpu", "--num-processes", "2", "--skypilot"))
    assert task["resources"] == {"cpus": "16+"}


def test_a_job_of_kubernetes(tmp_path: Path) -> None:
    path = tmp_path / "8x80gb.yaml"
    text = written(path, ".k8s.yaml", *SIXTEEN, "--kubernetes")
    for name, value in {"IMAGE": "registry/image:1", "CLAIM": "disk", "ARGS": shlex.join(OWN)}.items():
        text = text.replace(f"${{{name}}}", value)  # as envsubst does
    config, service, job = yaml.safe_load_all(text)
    assert [each["kind"] for each in (config, service, job)] == ["ConfigMap", "Service", "Job"]
    assert {each["metadata"]["name"] for each in (config, service, job)} == {"train-8x80gb"}
    assert config["data"]["launch.yaml"] == path.read_text()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == "train-8x80gb"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "train-8x80gb"}
    (container,) = pod["containers"]
    assert container["image"] == "registry/image:1" and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "disk"}

    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    bash, option = container["command"]
    assert bash == "bash"
    words = started(tmp_path, option, *container["args"], **variables, JOB_COMPLETION_INDEX="1")
    place = ["--machine_rank", "1", "--main_process_ip", "train-8x80gb-0.train-8x80gb", "--main_process_port", "29500"]
    assert words == ["launch", "--config_file", "/launch/launch.yaml", *place, "your_script.py", *OWN]
    words = ["--gpu", "mi300x", "--num-processes", "8", "--main-process-port", "1234", "--num-machines", "2"]
    text = written(tmp_path / "amd.yaml", ".k8s.yaml", *words, "--kubernetes").replace("${ARGS}", "")
    (container,) = [*yaml.safe_load_all(text)][2]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"amd.com/gpu": 4}
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    words = started(tmp_path, "-c", *container["args"], **variables, JOB_COMPLETION_INDEX="0")
    assert words[-3:] == ["--main_process_port", "1234", "your_script.py"]


def test_a_job_of_hugging_face(tmp_path: Path) -> None:
    path = tmp_path / "it's here.yaml"
    written(path, ".jobs.sh", "--gpu", "a100-80gb", "--num-processes", "4", "--hf-jobs")
    script = path.with_suffix(".jobs.sh")
    said = "\n".join(started(tmp_path, str(script), *OWN, IMAGE="image"))
    asked, inside = said.split("\n---\n")
    assert asked.splitlines()[:2] == ["jobs", "run"] and "--flavor\na100x4\n--timeout\n24h\n" in asked
    words = ["launch", "--config_file", "launch.yaml", "your_script.py", *OWN]
    assert inside == "\n".join([*words, path.read_text().strip()])


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("--slurm", "--slurm writes the batch script for `sbatch` next to the config: name that with --output"),
        ("--hf-jobs --output {tmp}/a.yaml --gpu h200 --num-processes 16", "use --num-machines 1"),
        ("--hf-jobs --output {tmp}/a.yaml --gpu h200 --num-processes 3", "no flavor with 3 x h200-141gb; say"),
        ("--skypilot --output {tmp}/a.yaml --gpu mi355x --num-processes 8", "has none for mi355x; say with --gpu"),
        ("--kubernetes --output {tmp}/a.yaml --gpu h300 --num-processes 8", "GPU 'h300' is not in the table"),
    ],
)
def test_what_cannot_be_started_is_one_line(tmp_path: Path, capsys: Any, words: str, cure: str) -> None:
    assert main(["init", *words.format(tmp=tmp_path).split()]) == 1
    said = capsys.readouterr().err
    assert cure in said and said.count("\n") == 1 and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot", "hf-jobs"])
def test_no_line_of_anothers_is_written(tmp_path: Path, capsys: Any, kind: str) -> None:
    odd = str(tmp_path / "a\n#SBATCH --wrap=evil\ntouch ran #.yaml")
    assert main(["init", f"--{kind}", *FOUR, "--output", odd]) == 1
    assert "has a line break, another control character" in capsys.readouterr().err
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"params": {"lr": "1\nenv: {A: b}"}}}))
    assert main(["convert", f"--{kind}", str(tmp_path / "ds.json"), "--output", str(tmp_path / "f.yaml")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]
    text = LaunchConfig(num_processes=2).to_accelerate_yaml(command="a\nb: 1", notes=["c\re: 1\u2028f: 2\x85g: 3"])
    assert yaml.safe_load(text) == yaml.safe_load(LaunchConfig(num_processes=2).to_accelerate_yaml())
