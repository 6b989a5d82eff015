"""The shape of the package: imports point down, `__all__` is what is public, importing changes nothing."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hf_fsdp_tools

PACKAGE = Path(hf_fsdp_tools.__file__).parent

LEVELS = (
    {"bare", "downloads", "errors", "host_memory", "older_torch", "placements"},
    {"appearance", "hub", "quantization", "release"},
    {
        "accelerate_keys",
        "allocate",
        "inference",
        "initialize",
        "integrations.scaler",
        "integrations.settings",
        "meta",
        "mesh",
        "sizes",
        "tokens",
        "tree",
    },
    {
        "plan",
        "checkpoint.agreement",
        "checkpoint.progress",
        "checkpoint.report",
        "checkpoint.slices",
        "checkpoint.spans",
        "checkpoint.stall",
    },
    {
        "compiled",
        "config",
        "demo",
        "fsdp1_shares",
        "live",
        "policy",
        "stacks",
        "checkpoint.opening",
        "checkpoint.stored",
    },
    {
        "checkpoint.dcp",
        "checkpoint.staging",
        "checkpoint.header",
        "integrations.wrapping",
    },
    {"checkpoint.pickled"},
    {"checkpoint.index", "checkpoint.pieces", "checkpoint.shares", "checkpoint.transfer"},
    {"blocks", "rules", "checkpoint.conversion", "checkpoint.gather", "checkpoint.reader", "checkpoint.rollback"},
    {"checkpoint.arrivals", "checkpoint.probe"},
    {
        "draft",
        "findings",
        "checkpoint.adapter",
        "checkpoint.checks",
        "checkpoint.exchange",
        "checkpoint.layout",
        "checkpoint.merge",
        "checkpoint.packed",
        "checkpoint.vocabulary",
    },
    {"arrange", "choose", "checkpoint.fit", "checkpoint.read_mode"},
    {"checkpoint.scales"},
    {"checkpoint.quantize"},
    {"checkpoint.fill"},
    {"wrap", "checkpoint.load", "checkpoint.save"},
    {"checkpoint", "fsdp1_policy", "shard"},
    {"adapters"},
    {"diagnostics", "fsdp1", "prepare", "resize"},
    {"doctor", "integrations.plugin", "integrations.rank0"},
    {"integrations.placement", "integrations.resume", "integrations.state"},
    {"integrations.accelerator", "integrations.frozen"},
    {"integrations.trainer"},
    {"cli", "integrations"},
    {""},
)
"""Module names below the package, lowest level first; a module may import lower levels only. "" is the package itself."""

LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it, except for type checking only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module if node.level == 0 else f"hf_fsdp_tools.{path.parent.name}.{node.module}"
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = {name.removeprefix("hf_fsdp_tools").removeprefix(".") for name in names if name.startswith("hf_fsdp_tools")}
    return {name for name in ours if name in LEVEL_OF}


def test_every_module_has_a_level():
    assert set(modules()) == set(LEVEL_OF)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_down(name):
    upward = {other for other in imports(modules()[name]) if LEVEL_OF[other] >= LEVEL_OF[name]}
    assert not upward, f"{name} imports {sorted(upward)}, which are not below it"


def test_only_integrations_imports_accelerate_and_the_trainer():
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        roots = {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        roots |= {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        assert ("accelerate" in roots) <= name.startswith("integrations"), name
        assert not roots & {"datasets", "trl"}, name
        assert ("peft" in roots) <= (name in ("adapters", "checkpoint.adapter")), name


def test_the_environment_is_read_in_two_places():
    readers = {
        name.split(".")[0]
        for name, path in modules().items()
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers <= {"mesh", "integrations"}


@pytest.mark.parametrize("name", sorted(modules()))
def test_all_is_what_is_public(name):
    module = importlib.import_module(f"hf_fsdp_tools.{name}".rstrip("."))
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), name)), (
        "constants, then the rest"
    )
    own = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__ and callable(value)
    }
    assert own <= set(module.__all__), f"public but not in __all__: {sorted(own - set(module.__all__))}"
    for key in module.__all__:
        value = getattr(module, key)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{key} has no docstring"


def test_the_front_door_lists_real_names():
    assert sorted(hf_fsdp_tools._MODULE_OF) == hf_fsdp_tools.__all__
    for name in hf_fsdp_tools.__all__:
        assert getattr(hf_fsdp_tools, name).__name__ == name
    with pytest.raises(AttributeError, match="from_pretrained"):
        _ = hf_fsdp_tools.no_such_name


def test_importing_changes_nothing():
    """A fresh process: no heavy import, no variable set, no logger configured."""
    code = (
        "import os, sys, logging; before = dict(os.environ), logging.root.handlers[:]; import hf_fsdp_tools; "
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy; assert before == (dict(os.environ), logging.root.handlers)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
