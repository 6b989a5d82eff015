"""What CI runs stands in `.ci/run` alone; versions that documents name are those that pyproject.toml asks for."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

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
