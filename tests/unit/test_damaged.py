"""Files that are damaged, or legal and absurd: one error that names file, fact and cure, in bounded time and length."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_fsdp_tools import CheckpointError, ConfigError, FSDPToolsError, LaunchConfig, load_adapter
from hf_fsdp_tools.errors import storage_errors
from hf_fsdp_tools.modeling import patterns
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.modeling.patterns import matched
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import Runs, make_checkpoint, make_model, stored_tensors
from tests.api import MANIFEST, METADATA, _matches, _problem_of_state, open_checkpoint, read_manifest, refuse_damage

Damage = Callable[[Path], object]

MOST_CHARACTERS = 1500


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    files = make_checkpoint("llama", root / "files")
    dcp.save({"model": make_model("llama").state_dict()}, checkpoint_id=root / "dcp", no_dist=True)
    shutil.copy(files / "config.json", root / "dcp")
    return {"files": files, "dcp": root / "dcp"}


def use(folder: Path) -> None:
    """Open, build and load, as `from_pretrained` does."""
    checkpoint = open_checkpoint(folder)
    model = build_meta_model(checkpoint.config)
    load_weights(model, checkpoint.index)


def config(name: str = "config.json", **changed: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return damage


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def metadata(change: Callable[[Metadata], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = pickle.loads((folder / METADATA).read_bytes())
        change(content)
        (folder / METADATA).write_bytes(pickle.dumps(content))

    return damage


KEY = "model.lm_head.weight"


def place_of(content: Metadata) -> Any:
    return next(place for key, place in content.storage_data.items() if key.fqn == KEY)


def nested(depth: int) -> str:
    return '{"model_type": "llama", "a": ' + "[" * depth + "]" * depth + "}"


NOT_DCP = r"\.metadata: is not as DCP writes it: .*Save it again"

NO_ROPE = {"rope_type": "nonsense", "rope_theta": 1e4}
DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "config nested deeply": ("files", text("config.json", nested(100_000)), r"config\.json: is not valid JSON: Recur"),
    "sizes beyond 64 bits": ("files", config(hidden_size=10**30), r"configuration of .*cannot be used.*config\.json"),
    "unknown rope": ("files", config(rope_parameters=NO_ROPE), r"configuration of .*'nonsense'.*config\.json"),
    "a function as dtype": ("files", config(dtype="load"), r"config\.json: names the dtype 'load'"),
    "generation config a list": (
        "files",
        text("generation_config.json", "[]"),
        r"_config\.json: expected .*, found \[\]",
    ),
    "a place that is a text": ("dcp", metadata(lambda c: setattr(place_of(c), "offset", "7")), NOT_DCP),
}
"""The format, what is done to it, and what the error says."""


@pytest.mark.parametrize("name", DAMAGED)
def test_one_error_names_file_fact_and_cure(good: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, damage, said = DAMAGED[name]
    folder = Path(shutil.copytree(good[kind], tmp_path / "damaged"))
    damage(folder)
    with pytest.raises((CheckpointError, ConfigError), match=said) as caught:
        use(folder)
    message = str(caught.value)
    assert str(folder) in message and len(message) < MOST_CHARACTERS and message.count("\n") < 5, message


def test_integers_are_not_called_quantised_and_no_class_is_changed(good: dict[str, Path], tmp_path: Path) -> None:
    tensors = stored_tensors(good["files"])
    tensors["lm_head.weight"] = tensors["lm_head.weight"].int()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' holds int32, expected floating-point") as caught:
        load_weights(build_meta_model(good["files"]), tmp_path)
    assert "uanti" not in str(caught.value)
    folder = Path(shutil.copytree(good["files"], tmp_path / "other"))
    for layers in (1, 30):
        config(num_hidden_layers=layers)(folder)
        use(folder)


@pytest.fixture(scope="module")
def adapter(good: dict[str, Path]) -> Path:
    model = AutoModelForCausalLM.from_pretrained(good["files"])
    folder = good["files"].parent / "adapter"
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(folder)
    return folder


adapter_config = partial(config, name="adapter_config.json")


def truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def with_code(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"a": Runs(folder / "ran")}, folder / "adapter_model.bin")


def of_other_shape(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({key: torch.ones(2, 2) for key in load_file(file)}, file)


DAMAGED_ADAPTERS: dict[str, tuple[Damage, str]] = {
    "base a number": (adapter_config(base_model_name_or_path=3), r"base_model_name_or_path is 3, expected a name"),
    "unknown type": (adapter_config(peft_type="EVIL"), r"config\.json: cannot be used by PEFT: KeyError: 'EVIL'"),
    "truncated": (truncated, r"adapter_model\.safetensors: cannot be read as the weights of an adapter: Safetensor"),
    "code": (with_code, r"adapter_model\.bin: holds more than tensors.*could run code"),
    "a module to import": (
        adapter_config(megatron_config={}, megatron_core="os"),
        r"megatron_core is 'os', expected '",
    ),
    "no pattern": (adapter_config(target_modules="(.*"), r"'\(\.\*' is no regular expression .*: missing \)"),
    "a rank of 10^9": (adapter_config(r=10**9), r"a dimension is 1000000000, and adapter_model\.safe.* holds"),
    "another shape": (of_other_shape, r"PEFT cannot make .*size mismatch.*Load the base that it"),
}


@pytest.mark.parametrize("name", DAMAGED_ADAPTERS)
def test_a_damaged_adapter_is_one_error_and_leaves_the_model(
    good: Any, adapter: Path, tmp_path: Path, name: str
) -> None:
    damage, said = DAMAGED_ADAPTERS[name]
    folder = Path(shutil.copytree(adapter, tmp_path / "damaged"))
    damage(folder)
    model = AutoModelForCausalLM.from_pretrained(good["files"])
    before = described(model)
    with pytest.raises((CheckpointError, ConfigError), match=said) as caught:
        load_adapter(model, folder)
    assert len(str(caught.value)) < MOST_CHARACTERS
    assert described(model) == before and not (folder / "ran").exists()
    assert load_adapter(model, adapter).base_model.model is model, "and the good one can be added"


def described(model: torch.nn.Module) -> list[Any]:
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return [modules, hooks, [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]]


ENDLESS = ("(.|.)*[xy]$", "(?:(?:.|[a-z]|m)+)+[0-9]$")


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_pattern_that_takes_endless_time_is_one_error(good: dict[str, Path], adapter: Path, tmp_path: Path, key: str):
    """Whichever entry of the config holds it."""
    folder = Path(shutil.copytree(adapter, tmp_path / "damaged"))
    adapter_config(**{key: {ENDLESS[0]: 3} if key == "rank_pattern" else ENDLESS[0]})(folder)
    with (
        patch.object(patterns, "_MATCH_S", 0.1),
        pytest.raises(CheckpointError, match=r"adapter_config\.json: '.*is no regular .* that can be used.*timed out"),
    ):
        load_adapter(AutoModelForCausalLM.from_pretrained(good["files"]), folder)


@pytest.mark.parametrize("pattern", [*ENDLESS, "(.*", "(){1000000000}", "((){ 999 , }){999}", "(" * 10_001])
def test_patterns_of_a_quantisation_config_end_too_or_are_refused(pattern: str) -> None:
    """`regex` unrolls what is counted, until no memory is left."""
    assert matched(r".*\.layers\.[0-9]+\..*(q|v)_proj", "model.layers.0.self_attn.q_proj")
    said = "quantization_config: .*timed" if pattern in ENDLESS else "is no regular .*: (missing|it is too long)"
    with patch.object(patterns, "_MATCH_S", 0.1), pytest.raises(CheckpointError, match=said) as caught:
        _matches("model.layers.0.self_attn.q_proj." * 3, ["Linear"], [f"re:{pattern}"])
    assert len(str(caught.value)) < MOST_CHARACTERS


def in_file(name: str, content: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return make


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / MANIFEST)
    return folder / MANIFEST


def without_end(folder: Path) -> Path:
    with (folder / "ds.json").open("wb") as stream:
        stream.truncate(2**40)
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    return in_file("c.yaml", text)(folder)


def problem(file: Path) -> None:
    args = TrainingArguments(output_dir=str(file.parent), report_to="none", use_cpu=True)
    if found := _problem_of_state(file.parent, args):
        raise CheckpointError(f"{file.parent} {found}")


HISTORY = '{"global_step": 3, "log_history": [5]}'
FILES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object], str]] = {
    "a manifest that is a pipe": (pipe, lambda file: read_manifest(file.parent), "is no regular file"),
    "a history of numbers": (in_file("trainer_state.json", HISTORY), problem, r"\(log_history is \[5\]\)"),
    "a billion labels": (
        in_file("config.json", '{"model_type": "llama", "num_labels": 1000000000}'),
        load_config,
        "'num_labels' is 1000000000, expected at most 1,000,000",
    ),
    "fewer layers than none": (
        in_file("config.json", '{"model_type": "llama", "num_hidden_layers": -1}'),
        load_config,
        "'num_hidden_layers' is -1, expected at most 10,000 and none",
    ),
    "a manifest of names without end": (
        in_file(MANIFEST, json.dumps({"format": 1, "ranks": 1, "files": {str(i): {} for i in range(200_001)}})),
        lambda file: read_manifest(file.parent),
        "is no list of at most 200,000 files",
    ),
    "a scheduler of another kind": (
        lambda folder: torch.save([1], folder / "scheduler.bin") or folder,
        refuse_damage,
        r"scheduler\.bin: holds a list, expected a dict",
    ),
    "YAML of a megabyte": (in_file("c.yaml", "a: 1\n" * 250_000), LaunchConfig.check_file, "is 1,250,000 bytes long"),
    **{
        f"YAML with {name}": (in_file("c.yaml", text), LaunchConfig.translate_file, said)
        for name, text, said in (
            (
                "merge keys",
                "a: &a {b: 1}\nc: {<<: [*a, *a]}\n",
                r"c\.yaml.*, line 2: the alias \*a is not read here: write ",
            ),
            ("a value in itself", "a: &a [*a]\n", r"c\.yaml.* the alias \*a is not read"),
            ("a number in base 60", "a: 1" + ":1" * 300_000, r"c\.yaml.* a value of 600,001 characters is not read"),
            ("lists in lists", "a: " + "[" * 10**5, r"c\.yaml.*RecursionError"),
            ("maps in maps", "{a: " * 10**4 + "}" * 10**4, r"c\.yaml.*RecursionError"),
            ("no such month", "a: 2026-13-01", r"c\.yaml.*ValueError: month must be"),
            ("a long number", "a: " + "9" * 5000, r"c\.yaml.* a value of 5,000 characters"),
            ("a wrong tag", "a: !!timestamp x", r"c\.yaml.*AttributeError"),
        )
    },
    "a config that is a pipe": (pipe, LaunchConfig.translate_file, "is no regular file"),
    "DeepSpeed's file without end": (without_end, LaunchConfig.translate_file, "is 1,099,511,627,776 bytes long"),
}
"""How a file is made, what reads it, and what the error says."""


@pytest.mark.parametrize("name", FILES)
def test_files_beside_the_weights_are_one_error_too(tmp_path: Path, name: str) -> None:
    make, read, said = FILES[name]
    with pytest.raises(FSDPToolsError, match=said) as caught:
        read(make(tmp_path))
    assert len(str(caught.value)) < MOST_CHARACTERS


def test_a_full_disk_is_one_error_whoever_writes() -> None:
    file = Path("/dev/full")
    by_torch = (partial(torch.save, torch.zeros(n), file) for n in (9, 10**5))
    for write in (partial(file.write_text, "a"), *by_torch):
        with pytest.raises(CheckpointError, match="Cannot save to '/dev/full'"), storage_errors("save to", file):
            write()
    with pytest.raises(RuntimeError, match="of something else"), storage_errors("save to", file):
        raise RuntimeError("of something else")


def test_values_that_no_json_has_are_said_like_others(tmp_path: Path) -> None:
    file = in_file("c.yaml", "distributed_type: FSDP\nnum_processes: 1\nmine: [2026-01-01, !!set {b}]\n")(tmp_path)
    assert "mine" in " ".join(finding.fact for finding in LaunchConfig.check_file(file))
