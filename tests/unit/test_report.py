"""`hf-fsdp report`: what its file says, and what it never says."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

pytest.importorskip("trl")

from hf_fsdp_tools.cli import report
from tests._dist import imitate_gpus
from tests.api import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ended(monkeypatch, tmp_path, capsys):
    """The report of a recipe that prints these lines, notes this measurement and ends with this code."""
    imitate_gpus(monkeypatch, 0)
    monkeypatch.chdir(tmp_path)

    def of(words, *, told=(), noted=None, code=0):
        def launched(recipe, given, heard):
            heard += told
            if noted is not None:
                Path(given[given.index("--report_estimate") + 1]).write_text(json.dumps(noted) + "\n")
            return code

        monkeypatch.setattr(report, "launched", launched)
        assert main(["report", *words]) == code
        (file,) = tmp_path.glob("hf-fsdp-report-*")
        said = capsys.readouterr().out
        assert file.name in said and "nothing was sent" in said
        return json.loads(file.read_text()), said

    return of


def test_what_was_measured_stands_beside_what_was_estimated(ended):
    noted = {"model": "Qwen/Qwen3-8B", "estimated": {"peak_gb": 61.0}, "measured": {"peak_gb": 60.5}}
    found, said = ended(["dpo"], noted=noted, told=["a row of its user", "step 5 of 20: loss 2.0"])
    assert {name: found[name] for name in noted} == noted and found["versions"]["torch"] and found["devices"]
    assert found["told"] == ["step 5 of 20: loss 2.0"] and found["exit_code"] == 0
    assert "60.5 GB measured, 61.0 GB estimated" in said


@pytest.mark.parametrize(
    "error",
    ["finetune: error: No checkpoint 'a/b'", "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"],
)
def test_a_recipe_that_fails_is_reported_with_its_error(ended, error):
    end = "hf-fsdp: rank 0 ended with exit code 1; its error stands above"
    found, said = ended([], told=["estimated peak 90.1 of 84.9 GB", "  File x", error, error, end], code=1)
    assert found["told"] == ["estimated peak 90.1 of 84.9 GB", error, end] and found["measured"] is None
    assert found["exit_code"] == 1 and error in " ".join(said.split())


def test_no_path_host_or_token_of_the_user_is_in_the_file(ended, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-mine")
    (tmp_path / "mine").mkdir()
    words = ["finetune", "--model_name_or_path", "mine", "--dataset_name=/data/rows.jsonl", "--run_name", "secret run"]
    words += ["--preset", "qwen3-8b", "--learning_rate", "-1e-5", "--hub_token", "hf_abcdefghijkl", "--use_peft"]
    words += ["--main_process_ip", "10.1.2.3", "--packing", "true", "--teacher_model_name_or_path", "../other"]
    private = f"{tmp_path}/x.pt ~/data /home/me/a.py:3 {socket.gethostname()} a-token-of-mine secret run 10.1.2.3"
    noted = {"model": "M", "estimated": {"none": private}, "measured": {"peak_gb": 1.0}}
    found, _ = ended(words, told=[f"finetune: error: mine/config.json, {private}"], noted=noted)
    assert found["command"] == (
        "hf-fsdp report finetune --model_name_or_path … --dataset_name=… --run_name … --preset qwen3-8b "
        "--learning_rate -1e-5 --hub_token … --use_peft --main_process_ip … --packing true "
        "--teacher_model_name_or_path …"
    )
    text = json.dumps(found, ensure_ascii=False)
    for each in ("mine", "/data", "home", socket.gethostname(), "token-of", "secret", "10.1", str(tmp_path), "hf_abc"):
        assert each not in text, each


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("acelerate_loop", "is no recipe with a Trainer"),
        ("finetun", "did you mean finetune?"),
        ("--preset none", "it has"),
    ],
)
def test_what_cannot_be_started_is_an_error_and_no_report(words, cure, monkeypatch, tmp_path, capsys):
    imitate_gpus(monkeypatch, 1, memory=85 * 10**9)
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words.split()]) == 1
    assert cure.lower() in capsys.readouterr().err.lower() and not [*tmp_path.iterdir()]


def test_a_folder_that_takes_no_file_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(report.tempfile, "TemporaryDirectory", Mock(side_effect=OSError(30, "Read-only file system")))
    assert main(["report"]) == 1
    assert "Read-only file system. Check path, permissions and space" in capsys.readouterr().err


def test_the_demo_is_reported_from_two_processes(tmp_path):
    command = [sys.executable, "-m", "hf_fsdp_tools", "report", "--cpu", "--max_steps", "10"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (file,) = tmp_path.glob("hf-fsdp-report-*")
    found = json.loads(file.read_text())
    assert found["model"] == "LlamaForCausalLM" and found["estimated"] is None and found["exit_code"] == 0
    assert found["measured"]["peak_gb"] > 0 and found["measured"]["tokens_per_second_per_gpu"] > 0
    assert [line.partition(":")[0] for line in found["told"]] == ["step 5 of 10", "step 10 of 10"]
    assert "trained over 2 ranks" in done.stdout and str(tmp_path) not in file.read_text()


def test_the_issue_template_asks_for_the_file():
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "report.yml").read_text())
    assert template["name"] == "A first report"
    (field,) = [each for each in template["body"] if each.get("validations", {}).get("required")]
    assert field["attributes"]["render"] == "json" and "hf-fsdp-report-" in field["attributes"]["description"]
