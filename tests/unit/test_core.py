"""The core runs without `extensions/` and what stands on it: in a copy that has only the core's rooms."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_fsdp_tools
from tests._checkpoints import make_checkpoint
from tests.test_architecture import CORE, imports, modules, room_of

FOR_TESTS = ("testing", "proof", "proof.shrink", "proof.batches")
"""Modules beside the core that tests need: they launch ranks, and make small models and batches."""

PACKAGE = Path(hf_fsdp_tools.__file__).parent
TESTS = Path(__file__).parents[1]

RUN = """
import importlib, pkgutil, sys, torch, hf_fsdp_tools
for each in pkgutil.walk_packages(hf_fsdp_tools.__path__, "hf_fsdp_tools."):
    importlib.import_module(each.name)
from hf_fsdp_tools import from_pretrained, save_pretrained, ConfigError
from hf_fsdp_tools.distributed.mesh import ParallelDims

model = from_pretrained(sys.argv[1], mesh=ParallelDims().build_mesh("cpu"), activation_checkpointing=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.arange(3, 19).view(2, 8)
losses = []
for _ in range(2):
    losses.append(model(input_ids=rows, labels=rows).loss)
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
assert losses[1] < losses[0]
save_pretrained(model, sys.argv[2])
again = from_pretrained(sys.argv[2])
assert torch.equal(again(input_ids=rows).logits, model(input_ids=rows).logits)
for call in (lambda: save_pretrained(model, "memory://it"), lambda: hf_fsdp_tools.Muon(model)):
    try:
        call()
    except (ConfigError, ModuleNotFoundError) as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A folder with a copy of the package that has the core alone, and what launches ranks for tests."""
    target = tmp_path / "copy" / "hf_fsdp_tools"
    for name, path in modules().items():
        if room_of(name) in (*CORE, "") or name in FOR_TESTS:
            (target / path.relative_to(PACKAGE)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / path.relative_to(PACKAGE))
    return target.parent


def run(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(core), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *words], env=environment, cwd=core, capture_output=True, text=True)


def test_the_core_loads_trains_and_saves_without_the_rooms_below(core: Path, tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    done = run(core, "-c", RUN, str(model), str(tmp_path / "saved"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "ConfigError: This installation has no hf_fsdp_tools.extensions.stores.in_store, which this needs. Install the "
        "package.",
        "ModuleNotFoundError: No module named 'hf_fsdp_tools.extensions'",
    ]


BESIDE = ("test_core", "test_extending", "test_notebook", "test_opening", "test_certificates", "test_gpu_plan")
BESIDE += ("test_space",)
"""Tests of core and more, or whose helpers need more."""


def is_of_core(path: Path) -> bool:
    """Whether a test names nothing beside the core and what tests need."""
    homes, text = hf_fsdp_tools._MODULE_OF, path.read_text()
    needed = {*imports(path)} | {home for name, home in homes.items() if re.search(rf"\b{name}\b", text)}
    return {*map(room_of, needed)} <= {*CORE, "testing", "proof"} and path.stem not in BESIDE


@pytest.mark.nightly
def test_the_cores_tests_pass_without_the_rooms_below(core: Path) -> None:
    shutil.copy(TESTS.parent / "pyproject.toml", core)  # with which tests are nightly
    shutil.copytree(TESTS, core / "tests", ignore=shutil.ignore_patterns("__pycache__", "ranks", "recipes"))
    files = [f"tests/unit/{path.name}" for path in sorted((TESTS / "unit").glob("test_*.py")) if is_of_core(path)]
    assert len(files) > 20
    done = run(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-4000:]
