"""Files that are damaged, hostile, of other tools, or legal and absurd: one error that names file, fact and cure, in
bounded time and length, a row each."""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_fsdp_tools import CheckpointError, FSDPToolsError, LaunchConfig, from_pretrained, load_adapter
from hf_fsdp_tools.steps import build_meta_model, load_weights, open_checkpoint
from tests import api
from tests._checkpoints import Runs, make_checkpoint, make_model
from tests.api import matches
from tests.unit.test_index import Damage, config, stored

MOST_CHARACTERS = 1500
INDEX, HEAD = "model.safetensors.index.json", "model.lm_head.weight"


def text(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def pipe(name: str) -> Damage:
    return lambda folder: os.mkfifo(folder / name)


def sparse(name: str, size: int) -> Damage:
    def damage(folder: Path) -> None:
        with open(folder / name, "wb") as stream:
            stream.truncate(size)

    return damage


def all_of(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    files = make_checkpoint("llama", root / "files")
    dcp.save({"model": make_model("llama").state_dict()}, checkpoint_id=root / "dcp", no_dist=True)
    shutil.copy(files / "config.json", root / "dcp")
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(files), lora).save_pretrained(root / "adapter")
    return {"files": files, "dcp": root / "dcp", "adapter": root / "adapter"}


def use(folder: Path) -> None:
    """Open, build and load, as `from_pretrained` does."""
    checkpoint = open_checkpoint(folder)
    model = build_meta_model(checkpoint.config)
    try:
        load_weights(model, checkpoint.index)
    except FSDPToolsError:
        assert all(parameter.is_meta for parameter in model.parameters())
        raise


def metadata(change: Callable[[Metadata, Any], object]) -> Damage:
    """Of a folder of DCP; the second argument is the place of the head's tensor."""

    def damage(folder: Path) -> None:
        content: Metadata = pickle.loads((folder / api.METADATA).read_bytes())
        change(content, next(place for key, place in content.storage_data.items() if key.fqn == HEAD))
        (folder / api.METADATA).write_bytes(pickle.dumps(content))

    return damage


NO_ROPE = {"rope_type": "nonsense", "rope_theta": 1e4}
NESTED = '{"model_type": "llama", "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
COPIES: dict[str, tuple[str, Damage, str]] = {
    "config nested deeply": ("files", text("config.json", NESTED), r"config\.json: is not valid JSON: Recur"),
    "unknown rope": ("files", config(rope_parameters=NO_ROPE), r"configuration of .*'nonsense'.*config\.json"),
    "a place outside": ("dcp", metadata(lambda _, place: vars(place).update(relative_path="../other")),
         r"names '\.\./other', expected a file of the folder"),
    "a chunk too few": ("dcp", metadata(lambda content, _: content.state_dict_metadata[HEAD].chunks.pop()),
         r"chunks of .* \[131, 48\] leave something out.*save it again"),
    "code in DCP": ("dcp", text(api.METADATA, pickle.dumps({"a": Path.touch})), "nothing that DCP writes"),
    "chunks too short": ("dcp", lambda folder: os.truncate(next(folder.glob("*.distcp")), 1000),
         "bytes long, but .* is at bytes .*The checkpoint is not complete"),
    "weights out of the folder": ("files", config(transformers_weights="../x.safetensors"),
         "expected a file inside the folder"),
    "a file too few": ("files", lambda folder: [file.unlink() for file in (folder / INDEX, *folder.glob("*-00002*"))],
         r"3 of 4 files model-\*-of-00004.safetensors and no index"),
    "files too short": ("files", lambda folder: [os.truncate(file, 500) for file in folder.glob("*-0000[12]-*")],
         r"2 problems(.|\n)*00001(.|\n)*00002"),
}  # fmt: skip
"""What is copied, what is done to it, and what the error says."""


@pytest.mark.parametrize("name", COPIES)
def test_a_damaged_copy_is_one_error(good: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, damage, said = COPIES[name]
    damage(folder := Path(shutil.copytree(good[kind], tmp_path / "damaged")))
    with pytest.raises(FSDPToolsError, match=said) as caught:
        use(folder)
    message = str(caught.value)
    assert str(folder) in message and len(message) < MOST_CHARACTERS and message.count("\n") < 5, message


def truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def with_code(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"a": Runs(folder / "ran")}, folder / "adapter_model.bin")


adapter_config = partial(config, name="adapter_config.json")
ENDLESS = ("(.|.)*[xy]$", "(?:(?:.|[a-z]|m)+)+[0-9]$")
TIMED_OUT = r"adapter_config\.json: '.*is no regular .* that can be used.*timed out"

ADAPTERS: dict[str, tuple[Damage, str]] = {
    "base a number": (adapter_config(base_model_name_or_path=3), r"base_model_name_or_path is 3, expected a name"),
    "truncated": (truncated, r"adapter_model\.safetensors: cannot be read as the weights of an adapter: Safetensor"),
    "code": (with_code, r"adapter_model\.bin: holds more than tensors.*could run code"),
    "a module to import": (adapter_config(megatron_config={}, megatron_core="os"), "megatron_core is 'os', expected"),
    "no pattern": (adapter_config(target_modules="(.*"), r"'\(\.\*' is no regular expression .*: missing \)"),
    **{
        f"endless {key}": (adapter_config(**{key: {ENDLESS[0]: 3} if key == "rank_pattern" else ENDLESS[0]}), TIMED_OUT)
        for key in ("target_modules", "exclude_modules", "rank_pattern")
    },
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_damaged_adapter_is_one_error_and_leaves_the_model(good: Any, tmp_path: Path, name: str) -> None:
    damage, said = ADAPTERS[name]
    damage(folder := Path(shutil.copytree(good["adapter"], tmp_path / "damaged")))
    model = AutoModelForCausalLM.from_pretrained(good["files"])
    before = described(model)
    with api.patched(_MATCH_S=0.1), pytest.raises(FSDPToolsError, match=said) as caught:
        load_adapter(model, folder)
    assert len(str(caught.value)) < MOST_CHARACTERS
    assert described(model) == before and not (folder / "ran").exists()
    assert load_adapter(model, good["adapter"]).base_model.model is model, "and the good one can be added"


def described(model: torch.nn.Module) -> list[Any]:
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return [modules, hooks, [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]]


@pytest.mark.parametrize("base", ["reference://::file:///r.json", "s3://bucket/base", "simplecache::s3://bucket/base"])
def test_a_file_does_not_say_what_this_process_connects_to(good: Any, tmp_path: Path, base: str) -> None:
    folder = Path(shutil.copytree(good["adapter"], tmp_path / "adapter"))
    adapter_config(base_model_name_or_path=base)(folder)
    with pytest.raises(CheckpointError, match=r"as its base\. A file may name a folder"):
        from_pretrained(folder)


@pytest.mark.parametrize("pattern", [*ENDLESS, "(.*", "(){1000000000}", "((){ 999 , }){999}", "(" * 10_001])
def test_patterns_of_a_quantisation_config_end_too_or_are_refused(pattern: str) -> None:
    """`regex` unrolls what is counted, until no memory is left."""
    assert api.matched(r".*\.layers\.[0-9]+\..*(q|v)_proj", "model.layers.0.self_attn.q_proj")
    said = "quantization_config: .*timed" if pattern in ENDLESS else "is no regular .*: (missing|it is too long)"
    with api.patched(_MATCH_S=0.1), pytest.raises(CheckpointError, match=said) as caught:
        matches("model.layers.0.self_attn.q_proj." * 3, ["Linear"], [f"re:{pattern}"])
    assert len(str(caught.value)) < MOST_CHARACTERS


def entry(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def weights(content: bytes) -> Damage:
    return text("model.safetensors", content)


GOOD = stored({"a": entry()}, bytes(8))
NAMES = {"a": "x.safetensors", "b": "y.safetensors"}


def listed(content: Any) -> Damage:
    """Two good files, and an index file that says this of them."""
    other = stored({"b": entry()}, bytes(8))
    listing = text(INDEX, content if isinstance(content, bytes) else json.dumps(content))
    return all_of(text("x.safetensors", GOOD), text("y.safetensors", other), listing)


def mapped(**more: Any) -> Damage:
    return listed({"weight_map": NAMES | more})


def instead(damage: Damage) -> Damage:
    """An index file that names one file, in whose place something else is."""
    return all_of(text(INDEX, json.dumps({"weight_map": {"a": "x.safetensors"}})), damage)


def linked(to: str) -> Damage:
    return lambda folder: (folder / "x.safetensors").symlink_to(folder / to)


def of_tool(*names: str) -> Damage:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"")

    return make


TWO_OF_ONE_NAME = [text(name, GOOD) for name in NAMES.values()]
TWICE = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
NO_WEIGHTS = r"No weights in .*"
NEMO = f"{NO_WEIGHTS}folder 'model' inside, as NeMo AutoModel's are"
FOLDERS: dict[str, tuple[Damage, str]] = {
    "key twice": (weights(stored(TWICE)), r"model\.safetensors.*key 'a' occurs twice"),
    "git-lfs": (weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "git-lfs.*Run `git lfs pull`"),
    "a long name": (weights(stored({"." * 10**5: entry()}, bytes(8))), "names a tensor by 100,000 characters"),
    "absent file": (mapped(c="gone.safetensors"), "'gone.safetensors' for 1 tensor.*there"),
    "leaves the folder": (mapped(a="../x.safetensors"), "inside the folder"),
    "no JSON": (listed(b"\xff\xff{"), r"json: is not valid JSON: UnicodeDecodeError.*The file is damaged"),
    "a link to nothing": (instead(linked("blob")), r"'x\.safetensors' \(a link to '.*blob'\) .*is not there\. Downl"),
    "a pipe": (pipe("x.safetensors"), "is no regular file"),
    "terabytes": (sparse("x.safetensors", 2**43), r"x\.safetensors: cannot be (read|mapped)"),
    "one key in two files": (all_of(*TWO_OF_ONE_NAME),
         "y.safetensors: holds 'a', which x.safetensors holds too; keep one"),
    "no folder": (lambda folder: folder.rmdir(), r"No such folder.*Give a folder"),
    "nothing": (lambda folder: None, rf"{NO_WEIGHTS}found nothing.*Give the folder"),
    "chunks without metadata": (of_tool("__0_0.distcp"), r"found __0_0.distcp. Its \.metadata is missing: copy it too"),
    "verl": (of_tool("model_world_size_2_rank_0.pt", "huggingface/config.json"), f"{NO_WEIGHTS}verl.model_merger m"),
    "DeepSpeed": (of_tool("latest", "zero_to_fp32.py", "global_step3/a.pt"), rf"{NO_WEIGHTS}zero_to_fp32\.py \. OUT"),
    "NeMo": (of_tool("model/model.safetensors", "optim/.metadata"), NEMO),
    "GGUF": (of_tool("model.gguf"), f"{NO_WEIGHTS}gguf_file=name"),
    "Lightning": (of_tool("last.ckpt"), f"{NO_WEIGHTS}Lightning wrote these files.*allow_pickle=True"),
}  # fmt: skip
"""What the folder holds, and what the error says."""


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_without_good_weights_is_one_error(tmp_path: Path, name: str) -> None:
    damage, said = FOLDERS[name]
    (folder := tmp_path / "folder").mkdir()
    damage(folder)
    for allow_pickle in (False, True) if said.startswith("No weights") else (False,):
        with pytest.raises(CheckpointError, match=rf"(?s){said}") as caught:
            api.CheckpointIndex.open(folder, allow_pickle=allow_pickle)
        assert str(folder) in str(caught.value) and len(str(caught.value)) < 1000


def pickled(content: bytes, **records: bytes) -> Damage:
    def make(folder: Path) -> None:
        with zipfile.ZipFile(folder / "x.bin", "w") as archive:
            for name, record in {"data.pkl": b"\x80\2" + content + b".", "version": b"3\n", **records}.items():
                archive.writestr(f"archive/{name}", record)

    return make


def saved(content: Any, name: str = "x.bin", **options: Any) -> Damage:
    return lambda folder: torch.save(content, folder / name, **options)


def saved_code(folder: Path, name: str = "x.bin") -> None:
    torch.save(ONES | {"b": Runs(folder / "ran")}, folder / name)


def check_state(folder: Path) -> None:
    args = TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True)
    if found := api._problem_of_state(folder, args):
        raise CheckpointError(f"{folder} {found}")


def of(name: str, read: Callable[[Path], object]) -> Callable[[Path], object]:
    """What reads that file of a folder."""
    return lambda folder: read(folder / name)


parsed, read_safely = of("x.bin", api.parse_pickled), of("x.bin", partial(api.load_pickled, safe=TORCH_SAFE_GLOBALS))
translated, checked = of("c.yaml", LaunchConfig.translate_file), of("c.yaml", LaunchConfig.check_file)


def of_llama(**sizes: int) -> Damage:
    return text("config.json", json.dumps({"model_type": "llama"} | sizes))


def yaml(content: str) -> Damage:
    return text("c.yaml", content)


ONES, OLDER = {"a": torch.ones(2)}, {"_use_new_zipfile_serialization": False}
HISTORY = '{"global_step": 3, "log_history": [5]}'
MLX = '{"fine_tune_type": "lora", "model": "base", "num_layers": 2}'
OF_MLX = text("adapter_config.json", MLX), text("adapters.safetensors", "")
DEEPSPEED = yaml("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n")
FILES: dict[str, tuple[Damage, Callable[[Path], object], str]] = {
    "an older format": (saved(ONES, **OLDER), parsed, r"no archive as torch\.save writes it.*torch\.save\(torch\.load"),
    "code": (saved_code, parsed, "could run code, so it was not opened .*GLOBAL.*allow its classes.*to safetensors"),
    "expanded": (saved({"a": torch.ones(3).expand(4, 3)}), parsed, "'a' is an expanded .*contiguous"),
    "a pipe": (pipe("x.bin"), parsed, "is no regular file"),
    "MLX": (all_of(*OF_MLX), from_pretrained, r"adapter of MLX-LM.*mlx_lm\.fuse --model BASE"),
    "a manifest that is a pipe": (pipe(api.MANIFEST), api.read_manifest, "is no regular file"),
    **{
        f"a manifest, {i}": (text(api.MANIFEST, content), api.read_manifest, api.MANIFEST)
        for i, content in enumerate(("{", "null", '{"format": 2}', '{"format": 1, "ranks": 2, "files": {"../a": {}}}'))
    },
    "a history of numbers": (text("trainer_state.json", HISTORY), check_state, r"\(log_history is \[5\]\)"),
    "a billion labels": (of_llama(num_labels=10**9), open_checkpoint, "'num_labels' is 1000000000, expected at most"),
    "a scheduler of another kind": (saved([1], "scheduler.bin"), api.refuse_damage,
         r"scheduler\.bin: holds a list, expected"),
    **{
        f"code in {name}": (partial(saved_code, name=name), api.refuse_damage, f"{name}: .*could run code")
        for name in ("scheduler.pt", "rng_state.pth")
    },
    "YAML of a megabyte": (yaml("a: 1\n" * 250_000), checked, "is 1,250,000 bytes long"),
    **{
        f"YAML with {name}": (yaml(content), translated, rf"c\.yaml.*{said}")
        for name, content, said in (
            ("merge keys", "a: &a {b: 1}\nc: {<<: [*a, *a]}\n", r", line 2: the alias \*a is not read here: write "),
            ("a number in base 60", "a: 1" + ":1" * 300_000, r" a value of 600,001 characters is not read"),
            ("maps in maps", "{a: " * 10**4 + "}" * 10**4, "RecursionError"),
            ("a long number", "a: " + "9" * 5000, " a value of 5,000 characters"),
        )
    },
    "DeepSpeed's file without end": (all_of(sparse("ds.json", 2**40), DEEPSPEED), translated,
         "is 1,099,511,627,776 bytes long"),
}  # fmt: skip
"""How a file is made, what reads it, and what the error says."""

DOUBLED = b")q\0" + b"".join(bytes((104, i, 104, i, 0x86, 113, i + 1)) for i in range(60))
PICKLES = {
    "a key of 2^60 parts": (b"}" + DOUBLED + b"Ns", "are repeated until they hold more than"),
    "a key doubled in place": (b"})" + b"2\x86" * 60 + b"Ns", "operation 0x32 is none that torch or DCP writes"),
    "gigabytes of zeros": (b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R", "bytearray is called otherwise than"),
    "a slow codec": (b"c_codecs\nencode\nX\1\0\0\0aX\x08\0\0\0punycode\x86R", "encode is called otherwise than"),
    "a memo of gigabytes": (b"Nr\xff\xff\xff\x7f", "place 2,147,483,647 of its memo is beyond its end"),
    "many dimensions": (b"ctorch._utils\n_rebuild_tensor_v2\nN(" + b"K\1" * 99 + b"t\x86R", "more than 64 dimensions"),
}
"""Pickles that torch's restricted unpickler, and that of DCP's metadata, would not be done with."""

for _name, (_content, _said) in PICKLES.items():
    FILES[f"{_name}, pickled"] = (pickled(_content), read_safely, rf"x\.bin: .* opened: .*{_said}.*download it again")
    _metadata = text(api.METADATA, b"\x80\2" + _content + b".")
    FILES[f"{_name}, in DCP"] = (_metadata, api.parse_dcp, rf"\.metadata: cannot be read as .*{_said}.*Save it again")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used_is_one_error(tmp_path: Path, name: str) -> None:
    make, read, said = FILES[name]
    make(tmp_path)
    with pytest.raises(FSDPToolsError, match=said) as caught:
        read(tmp_path)
    assert len(str(caught.value)) < MOST_CHARACTERS
    assert not (tmp_path / "ran").exists(), "code of the file was run"
    assert str(tmp_path) in str(caught.value)
