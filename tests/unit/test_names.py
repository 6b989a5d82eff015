"""Type checkers know the names that the front doors load lazily, with their types, and no others."""

import subprocess
import sys
from pathlib import Path

import pytest

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
