"""The shape and the size of the package: a room imports only rooms above it and keeps its budget of lines, importing
changes nothing."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import hf_fsdp_tools
from tests._documents import advise
from tests.api import ALWAYS, FEATURES, FSDP2_NAMES

PACKAGE = Path(hf_fsdp_tools.__file__).parent

CORE = (
    "text", "errors", "folders", "axes", "doors", "stores", "hub", "accelerator", "distributed", "modeling", "planning",
    "sharding", "background", "loading", "streaming", "saving", "diagnostics", "pretrained", "steps",
)  # fmt: skip
"""What runs without the rooms below, `extensions/` first of all."""

ROOMS = (*CORE, "extensions", "foresight", "plots", "scripting", "integrations", "testing", "proof", "cli", "__main__")
"""In the order in which they may import: each only rooms above it."""

NEVER = (
    ("planning", "distributed"),  # a plan is pure: no process group, no device
    ("sharding", "loading"),
)
"""(room, what it must not import although it stands above). Nothing at all imports `integrations`."""


BUDGET = {
    "": 110, "__main__": 10, "accelerator": 180, "axes": 125, "background": 175, "cli": 2225, "diagnostics": 970,
    "distributed": 1925, "doors": 35, "errors": 150, "extensions": 5370, "folders": 70, "foresight": 4275, "hub": 190,
    "integrations": 5135, "loading": 5880, "modeling": 3885, "planning": 1530, "plots": 120, "pretrained": 395,
    "proof": 1990, "saving": 3480, "scripting": 3455, "sharding": 5220, "steps": 15, "stores": 450,
    "streaming": 1095, "testing": 240, "text": 235,
}  # fmt: skip
"""Lines that a room may hold, and as many as the next 50 above. A change that needs more is warned of; its commit says
why."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    return module.split(".")[0]


tree_of = cache(ast.parse)  # of a text


def test_a_room_keeps_its_budget():
    lines = Counter[str]()
    for name, path in modules().items():
        lines[room_of(name)] += len(path.read_text().splitlines())
    for room, found in lines.items():
        budget = -(-BUDGET[room] // 50) * 50
        advise(found > budget and f"{room or 'the front door'} has {found} lines; its budget is {budget}")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree_of(path.read_text()))]


@cache
def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it, except for type checking only."""
    blocks = [n for n in nodes(path) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    left_out = {id(node) for block in blocks for each in block.body for node in ast.walk(each)}
    found = [node for node in nodes(path) if id(node) not in left_out]
    names = {node.module or "" for node in found if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[2] for name in names if name.startswith("hf_fsdp_tools.")}


def test_these_are_the_rooms():
    assert {room_of(name) for name in modules()} - {""} == set(ROOMS)


def test_a_room_imports_only_rooms_above_it():
    for name, path in modules().items():
        own = room_of(name)
        for other in {room_of(module) for module in imports(path)} - {own}:
            assert own == "" or ROOMS.index(other) < ROOMS.index(own), f"{name} imports {other}, which is not above it"
            is_launcher = (name, other) == ("cli.launch", "integrations")  # whose parser is Accelerate's
            assert (own, other) not in NEVER and (other != "integrations" or is_launcher), f"{name} imports {other}"


MAY_NAME_A_FEATURE = {
    ("pretrained", "sharding.compile"), ("pretrained", "sharding.recompute"),  # short forms of arguments
    ("sharding.added", "sharding.checks"),
    ("sharding.compile", "sharding.recompute"),
}  # fmt: skip
"""Modules of the core, and the modules of its own features that they import beside `shard.ALWAYS`."""


def test_the_core_knows_features_by_their_list_alone():
    named = {type(feature).__module__.partition(".")[2] for feature in ALWAYS}
    named |= {f"extensions.{name}" for name in FEATURES}
    names = {(name, other) for name, path in modules().items() for other in imports(path) & named}
    assert {each for each in names if room_of(each[0]) in CORE and each[0] != "sharding.shard"} == MAY_NAME_A_FEATURE


def test_no_module_imports_itself_in_a_circle():
    below = {name: {m for m in imports(path) if m in modules()} for name, path in modules().items()}

    def reach(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"imports in a circle: {' -> '.join((*path, name))}"
        if name not in done:
            for other in below[name]:
                reach(other, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in below:
        reach(name, ())


OF_PEFT = ("sharding.adapters", "sharding.injection", "loading.adapter_state", "saving.save_adapter", "proof.case")
OF_PEFT += ("proof.plain",)


def test_only_integrations_imports_accelerate_and_the_trainer():
    for name, path in modules().items():
        roots = {n.module.split(".")[0] for n in nodes(path) if isinstance(n, ast.ImportFrom) and n.module}
        roots |= {alias.name.split(".")[0] for n in nodes(path) if isinstance(n, ast.Import) for alias in n.names}
        assert ("accelerate" in roots) <= name.startswith(("integrations", "proof.resume")), name  # a user of it
        if room_of(name) == "scripting":  # for recipes, which have the three installed
            continue
        assert not roots & {"datasets", "trl"}, name
        assert ("peft" in roots) <= (name in OF_PEFT), name


DOORS = ("steps", "testing", "errors", "scripting")
MANY_ROOMS = {"ranks/test_proof.py", "api.py"}
"""A test that puts faults into rooms, so that a proof finds them, and the table of inner names."""


def inner_rooms(path: Path) -> set[str]:
    """Rooms of which a test knows more than what users see: what it imports, and names as text, for a patch."""
    named: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"hf_fsdp_tools(\.\w+)+", str(node.value)):
            named.add(node.value)
    public = {*hf_fsdp_tools.__all__, "__version__", "__file__", *DOORS}
    for door in DOORS:
        module = importlib.import_module(f"hf_fsdp_tools.{door}")
        public |= {f"{door}.{name}" for name, value in vars(module).items() if not isinstance(value, ModuleType)}
        public |= {f"{door}.{name}" for name in getattr(module, "__all__", ())}
    found = {name.partition(".")[2] for name in named if name.startswith("hf_fsdp_tools.")} - public
    return {room_of(name) for name in found}


def test_a_test_knows_what_users_see_and_its_own_room():
    """Names of other rooms stand in `tests/api.py`: a redesign of one room changes no test of another."""
    tests = Path(__file__).parent
    for path in sorted(tests.rglob("*.py")):
        rooms = inner_rooms(path) if str(path.relative_to(tests)) not in MANY_ROOMS else ()
        assert len(rooms) <= 1, f"{path.name} knows what is inside {rooms}; tests/api.py has names for several tests"


def test_the_front_door_lists_real_names_and_few():
    assert len(hf_fsdp_tools.__all__) <= 32
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


@pytest.mark.nightly
def test_importing_leaves_torch_as_it_is():
    """A fresh process: all modules of the package are imported, and no class or function that it works with is another
    one. (Others, as `torch.optim` and `torch.jit`, are changed by torch's own compiler and by transformers.)"""
    code = f"""
import importlib, sys, torch, torch.distributed.fsdp, torch.distributed.checkpoint, torch.distributed.device_mesh

def parts():
    for name, module in [(n, m) for n, m in sys.modules.items() if n.startswith(("torch.distributed", "torch.nn"))]:
        for key, value in list(vars(module).items()):
            if callable(value):
                yield (name, key), value
            if isinstance(value, type) and value.__module__.startswith("torch"):
                yield from (((name, key, part), own) for part, own in list(vars(value).items()) if callable(own))

before = dict(parts())
for name in {sorted(modules())!r}:
    importlib.import_module("hf_fsdp_tools." + name if name else "hf_fsdp_tools")
after = dict(parts())
changed = [key for key, value in before.items() if after.get(key) is not value]
assert not changed, changed
"""
    subprocess.run([sys.executable, "-c", code], check=True)


PRIVATE = {
    "sharding.fsdp2_internals": " ".join(
        ["REGISTRY_KEY STATE_KEY _module_state_mapping _composable _get_fsdp_state _fsdp_param_groups"]
        + [name for name in FSDP2_NAMES if re.match("_|.*(fsdp|shard|gather|mesh_info)", name)]
    ),
    "extensions.fsdp1": """
        _handle flat_param uses_sharded_strategy _params _param_infos _shapes _shard_param_infos
        _shared_param_infos _contiguities _fqns _sharded_size _inter_node_pg""",
    "distributed.shards": "_get_root_mesh _spec",
    "distributed.steps": "register_optimizer_step_pre_hook register_optimizer_step_post_hook",  # of all optimizers
    "loading.conversion": """
        core_model_loading conversion_mapping _weight_conversions _adjust_missing_and_unexpected_keys
        remove_tied_weights_from_state_dict""",
    "modeling.codecs.fp8": "finegrained_fp8 Fp8Dequantize _dequantize_one",
    "modeling.codecs.mxfp4": "convert_moe_packed_tensors",
    "modeling": "_get_dtype_plan _init_weights guard_torch_init_functions meta_device_safe_creation_ops",
}
"""Where private names of torch (FSDP2, FSDP1, DeviceMesh) and of transformers (loading) may stand: a module, or a
room."""

READ = r"\b(?:self|state|group|entry|info)\.(\w+)"
OURS = {"__class__", "__dict__", "was_trained", "gathered_as", "keep_unsharded_storage", "leave", "reduced_in"}
OURS |= {"show_shard", "show_shards", "shows_shards", "to_reduce", "is_as_stored"}


def test_the_names_of_fsdp2_are_those_that_its_fence_reads():
    """A torch that lacks one is refused when the fence is imported; it needs no source text for that."""
    code = (PACKAGE / "sharding" / "fsdp2_internals.py").read_text()
    below = "".join((PACKAGE / "extensions" / f"{name}.py").read_text() for name in ("float8", "streamed"))
    in_features = {name for name in FSDP2_NAMES if re.search(rf"\b(self|entry|def)[. ]{name}\b", below)}
    named_otherwise = {"_get_fsdp_state", "_get_grad_inner_tensor", "TrainingState"}
    assert {*re.findall(READ, code)} - OURS | in_features | named_otherwise == FSDP2_NAMES
    assert all(not name.startswith("_") or name in OURS for name in in_features), "the fence has words for these"


NOT_ONLY_FSDPS = {"_modules", "_device", "sharded_state", "unshard"}
"""Names that `nn.Module` has too."""


@cache
def private_names(path: Path) -> set[str]:
    """Every name that the code of a file uses; what docstrings say does not count."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)  # getattr(module, "name")
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
    return names


MOVING = {
    "distribute_module": set(),
    "distribute_tensor": {"sharding.placement"},
    "from_local": {"distributed.shards", "extensions.divided_head"},
}
"""Functions that take what they are given to the mesh's device, unasked, and the modules in which they may stand. These
give them tensors on meta, which stay there, and logits, which are there."""


@pytest.mark.parametrize("name", sorted(MOVING))
def test_nothing_moves_a_tensor_to_the_device_of_the_mesh_unasked(name):
    """With CPU offload the shards would go to the GPU; and whole tensors would, only to be cut there."""
    assert {module for module, path in modules().items() if name in private_names(path)} == MOVING[name]
