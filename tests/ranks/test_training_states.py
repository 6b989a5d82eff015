"""States that other tools have saved open as models and adapters and are exported, on any number of ranks."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils.fsdp_utils import save_fsdp_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

from hf_fsdp_tools import CheckpointError, FSDPPlugin, export_checkpoint, from_pretrained
from tests._checkpoints import assert_same_model, assert_same_tensors, full_state, plain_model, stored_tensors
from tests._dist import run_cases, run_ranks
from tests._training import new_accelerator
from tests.api import all_ranks

IDS = torch.arange(3, 19).reshape(1, 16)
SHARDED, FULL, LOCAL = StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def lora(base: Path | None) -> LoraConfig:
    named = None if base is None else str(base)
    targets = ["q_proj", "up_proj", "embed_tokens"]
    return LoraConfig(
        r=3, task_type="CAUSAL_LM", target_modules=targets, modules_to_save=["lm_head"], base_model_name_or_path=named
    )


def adapted(folder: Path) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(plain_model("llama", folder), lora(folder)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


def prepared(version: int, plain: Any, kind: StateDictType) -> tuple[Any, Any, Any]:
    options = {"use_orig_params": True} if version == 1 else {}
    accelerator = new_accelerator(fsdp_plugin=FSDPPlugin(fsdp_version=version, **options))
    plugin: Any = accelerator.state.fsdp_plugin
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type(kind)
    model = accelerator.prepare(plain)
    model(input_ids=IDS)  # FSDP1 has no full state before
    return plugin, accelerator, model


def save_by_accelerate(version: int, plain: Any, kind: StateDictType, folder: Path, **options: Any) -> None:
    """What `save_state` and the Trainer call (the Trainer with `adapter_only=True`)."""
    plugin, accelerator, model = prepared(version, plain, kind)
    if (version, kind) == (1, FULL):  # Accelerate asks for CPU offload, with which torch 2.13 fails on CPUs
        with FullyShardedDataParallel.state_dict_type(model, FULL, FullStateDictConfig()):
            state = model.state_dict()
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            torch.save(state, folder / "pytorch_model_fsdp.bin")
    else:
        save_fsdp_model(plugin, accelerator, model, str(folder), **options)


def save_all(folders: dict[str, Path], root: Path) -> None:
    llama = folders["llama"]
    for version, kind in ((1, "tied"), (2, "llama")):
        out = root / f"accelerate {version}"
        save_by_accelerate(version, plain_model(kind, folders[kind]), SHARDED, out / "checkpoint-5")
        save_by_accelerate(version, plain_model(kind, folders[kind]), FULL, out / "whole")
        if dist.get_rank() == 0:
            shutil.copy(folders[kind] / "config.json", out)
    save_by_accelerate(1, plain_model("llama", llama), LOCAL, root / "parts")
    save_by_accelerate(2, plain_model("llama", llama), SHARDED, root / "rank files", use_dcp=False)
    for version in (1, 2):
        for kind in (SHARDED, FULL):
            save_by_accelerate(version, adapted(llama), kind, root / f"peft {version} {kind.name[:4]}")
        save_by_accelerate(version, adapted(llama), SHARDED, root / f"adapter {version} SHAR", adapter_only=True)
    save_by_accelerate(2, adapted(llama), FULL, root / "adapter 2 FULL", adapter_only=True)
    if dist.get_rank() == 0:
        arrange_as_axolotl(root, llama)
    model = from_pretrained(llama)
    state = model.state_dict()
    for name, saved in NAMES.items():
        dcp.save(saved(state), checkpoint_id=root / "names" / name)


def arrange_as_axolotl(root: Path, base: Path) -> None:
    """Configs are saved before training, in the folder of the run; merged weights have none beside them."""
    out = root / "axolotl"
    adapted(base).save_pretrained(out)
    shutil.copytree(root / "adapter 2 SHAR", out / "checkpoint-3")
    shutil.copytree(root / "peft 2 SHAR", out / "deep" / "checkpoint-4")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(base / name, out)
    (out / "merged").mkdir()
    tensors = {f"_orig_mod.{key}": tensor for key, tensor in plain_model("llama", base).state_dict().items()}
    save_file(tensors, out / "merged" / "model.safetensors")


def renamed(change: Callable[[str], str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {change(key): tensor for key, tensor in state.items()}


NAMES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ddp, compiled": lambda state: {"model": renamed("_orig_mod.module.{}".format)(state)},
    "fsdp1 and checkpoint wrappers": renamed(
        lambda key: "_fsdp_wrapped_module." + key.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn.")
    ),
    "a module around it": lambda state: {"state_dict": renamed("policy.net.{}".format)(state)},
    "flat, with the optimizer": lambda state: (
        renamed("model.{}".format)(state) | renamed("optim.{}.exp_avg".format)(state)
    ),
    "an average beside it": lambda state: {"ema": {k: t * 2 for k, t in state.items()}, "run": {"model": state}},
    "a value head": lambda state: {"model": renamed("pretrained_model.{}".format)(state) | {"v_head.bias": IDS}},
    "two alike": lambda state: {"ema": state, "policy": state},
    "torchtitan": lambda state: {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "layers.0.attention.wq.weight": state["model.layers.0.self_attn.q_proj.weight"],
    },
    "another": lambda state: {"model": {"encoder.kernel.weight": state["lm_head.weight"]}},
}


def models(folders: dict[str, Path], root: Path) -> None:
    out, base = root / "axolotl", folders["llama"]
    sources: dict[Path, tuple[str, bool]] = {  # the kind, and whether a config must be given
        root / "accelerate 1" / "checkpoint-5": ("tied", False),
        root / "accelerate 1" / "checkpoint-5" / "pytorch_model_fsdp_0": ("tied", False),
        root / "accelerate 1" / "whole": ("tied", False),
        root / "accelerate 2" / "checkpoint-5": ("llama", False),
        root / "accelerate 2" / "whole" / "pytorch_model_fsdp.bin": ("llama", False),
        out / "merged": ("llama", False),
        **{root / "names" / name: ("llama", True) for name in list(NAMES)[:6]},
    }
    for source, (kind, is_given) in sources.items():
        options: dict[str, Any] = {"config": folders[kind]} if is_given else {}
        model, report = from_pretrained(source, output_loading_info=True, allow_pickle=True, **options)
        assert_same_model(model, plain_model(kind, folders[kind]), str(source))
        strange = {"a value head": 1, "flat, with the optimizer": 21}.get(source.name, 0)
        assert not report.missing_keys and len(report.unexpected_keys) == strange, (source, report)
        assert report.read_ratio <= 1.01, source
        if "names" not in source.parts:  # ranks share the work
            exported = root / f"{dist.get_world_size()}" / str(source.relative_to(root)).replace("/", " ")
            wrote = export_checkpoint(source, exported, max_shard_size="60KB", allow_pickle=True, **options)
            assert_same_tensors(stored_tensors(exported), stored_tensors(folders[kind]), source)
            assert sum(all_ranks(wrote.bytes_written)) == wrote.total_bytes
    # The PEFT config is near, or given; the base is in the state, or is named by the PEFT config.
    expected = adapted(base).state_dict()
    near = [out, out / "checkpoint-3", out / "deep" / "checkpoint-4"]
    given, alone = sorted(root.glob("peft *")), [root / "adapter 2 SHAR", root / "adapter 2 FULL"]
    for source in (*near, *given, *alone):
        options = {"is_trainable": source == near[1]}
        if source not in near:
            options = {"peft_config": lora(base if source in alone else None), "allow_pickle": True}
            options |= {"config": base} if source in given else {}
        model, report = from_pretrained(source, output_loading_info=True, **options)
        assert_same_tensors(full_state(model), expected, source)
        assert not report.missing_keys and not report.unexpected_keys and report.read_ratio <= 1.01, (source, report)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert len(trained) == (0 if source in (near[0], near[2]) else 11), source


def refusals(folders: dict[str, Path], root: Path) -> None:
    base, other = folders["llama"], lora(folders["llama"])
    given, other.r = {"config": base}, 5
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("parts", given, r"parts of 2 ranks.*LOCAL_STATE_DICT.*FULL_STATE_DICT"),
        ("rank files", given, r"parts of 2 ranks.*use_dcp=False"),
        ("names/ddp, compiled", {}, r"No config\.json in .* two folders above\. Pass config= "),
        ("names/torchtitan", given, r"torchtitan's own names.*convert_to_hf\.py.*last_save_in_hf"),
        ("names/another", given, r"holds 1 tensors, as 'model\.encoder\.kernel.*Use the config of the model"),
        ("names/two alike", given, r"2 parts that fit the model equally well: 'ema', 'policy'"),
        ("peft 2 SHAR", given, r"state of a PeftModel \(11 tensors.*adapter_config\.json.*Pass peft_config="),
        ("peft 2 SHAR", {"peft_config": lora(None)}, r"without the base's config\.json near it.*or pass config="),
        ("adapter 2 SHAR", {"peft_config": lora(None)}, "without the base's weights, .* names no base"),
        ("adapter 1 SHAR", {"peft_config": lora(base)}, r"lacks 10 of the adapter's 11 tensors.*with fsdp_version 1"),
        ("adapter 2 SHAR", {"peft_config": other}, r"another shape than the adapter's(.|\n)*\[3, .*\[5, "),
    ]
    for name, options, said in cases:
        with pytest.raises(CheckpointError, match=said):
            from_pretrained(root / name, allow_pickle=True, **options)
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        from_pretrained(root / "peft 2 FULL", config=base, peft_config=lora(None))


@pytest.fixture(scope="module")
def saved(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("states")
    run_ranks(save_all, 2, folders, root)
    return root


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_states_of_other_tools_open_on_any_number_of_ranks(folders: dict[str, Path], saved: Path, ranks: int) -> None:
    run_ranks(run_cases, ranks, [models, refusals], folders, saved)
