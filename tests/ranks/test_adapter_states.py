"""States of `save_state` without the frozen base: bytes, resume to the bit, other numbers of ranks, export, old
ones."""

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import CheckpointError, export_checkpoint, from_pretrained, save_pretrained
from hf_fsdp_tools.integrations import accelerator_state
from tests._checkpoints import assert_same_tensors, full, make_quantized, plain_model, randomize, refusal
from tests._dist import run_cases, run_ranks
from tests._training import batches_of, make_rows, new_accelerator, train
from tests.api import check_dcp

LORA = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
WHOLE = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
ADAPTER = "adapter_model.safetensors"
BIASES = LoraConfig(r=2, target_modules=["c_attn"], bias="all", task_type="CAUSAL_LM")


def _of_files(folder: Path, config: Any, **options: Any) -> Any:
    return partial(from_pretrained, folder, peft_config=config, load_kwargs={"progress": False}, **options)


def _pissa(folder: Path, accelerator: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    return get_peft_model(plain_model("llama", folder), config)


def _ways(root: Path) -> dict[str, Any]:
    ways: dict[str, Any] = {
        "lora": _of_files(root / "large", LORA),
        "whole modules": _of_files(root / "llama", LoraConfig(r=2, **WHOLE, task_type="CAUSAL_LM")),
        "biases": _of_files(root / "gpt2", BIASES),
        "prefix": _of_files(root / "llama", PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        "packed": _of_files(root / "fp8", LORA, dequantize=False),
        "pissa": partial(_pissa, root / "llama"),
    }
    if find_spec("bitsandbytes") is not None:
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        ways["qlora"] = _of_files(root / "large", LORA, quantization_config=four, dtype=torch.float32)
    return ways


@pytest.fixture(scope="module")
def root(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for kind in ("llama", "gpt2"):
        (root / kind).symlink_to(folders[kind])
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 512}
    randomize(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))).save_pretrained(root / "large")
    make_quantized("fp8", root / "fp8")
    return root


class Loop:
    def __init__(self, make: Any, kind: str = "SHARDED_STATE_DICT") -> None:
        self.accelerator = new_accelerator()
        plugin = self.accelerator.state.fsdp_plugin
        plugin.state_dict_config = plugin.optim_state_dict_config = None  # otherwise those of the other type stay
        plugin.set_state_dict_type(kind)
        torch.manual_seed(0)
        model = make(accelerator=self.accelerator).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made = torch.optim.AdamW(trained, lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, made)

    def train(self) -> list[float]:
        batches = batches_of(make_rows(dist.get_world_size()), 1)[dist.get_rank() :][:1]
        return train(self.model, self.optimizer, batches, accelerator=self.accelerator, clip=0.5)

    def adapter(self) -> dict[str, torch.Tensor]:
        held = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        return {name: full(p).clone() for name, p in held.items()}


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def goes_on(make: Any, out: Path, kind: str = "SHARDED_STATE_DICT") -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes of the state, and the adapter in it; a new loop that loads it goes on to the bit."""
    loop = Loop(make, kind)
    loop.train()
    loop.accelerator.save_state(out / "state")
    saved = loop.adapter()
    save_pretrained(loop.model, out / "saved")
    expected, trained = loop.train(), loop.adapter()
    other = Loop(make, kind)
    other.train()
    other.accelerator.load_state(out / "state")
    assert_same_tensors(other.adapter(), saved)
    assert other.train() == expected
    assert_same_tensors(other.adapter(), trained)
    return _bytes_of(out / "state"), saved


def an_old_state_opens(make: Any, out: Path) -> int:
    """As earlier versions wrote it, with the base."""
    with pytest.MonkeyPatch.context() as former:
        former.setattr(accelerator_state, "_leaves_base_out", lambda model: False)
        large, _ = goes_on(make, out)
    return large


def another_adapter_is_refused(make: Any, out: Path) -> None:
    Loop(make).accelerator.save_state(out / "state")
    shape, lacks = r"holds in another shape 'base_model\..*lora_A", r"lacks 'base_model\..*v_proj"
    for said, config in ((shape, {"r": 3}), (lacks, {"target_modules": ["q_proj", "down_proj", "v_proj"]})):
        other = Loop(_of_files(*make.args, LoraConfig(**{"r": 2, "target_modules": ["q_proj", "down_proj"], **config})))
        found = refusal(lambda other=other: other.accelerator.load_state(out / "state"), CheckpointError)
        assert re.search(said, found) and found.endswith("as in the run that saved it."), found


def on_one_rank(make: Any, out: Path, saved: dict[str, torch.Tensor]) -> None:
    loop = Loop(make)
    with pytest.warns(UserWarning, match=r"saved by 2 process\(es\) and is read by 1"):
        loop.accelerator.load_state(out / "state")
    assert_same_tensors(loop.adapter(), saved)
    moments = [state["exp_avg"] for state in loop.optimizer.state.values()]
    assert len(moments) == len(saved) and any(full(moment).any() for moment in moments)
    loop.train()


FAST = ("lora", "whole modules", "qlora")
"""Adapters of the nightly tier are near one of these."""


@pytest.mark.parametrize(
    "names",
    [FAST, pytest.param(("biases", "prefix", "packed", "pissa"), marks=pytest.mark.nightly)],
    ids=["fast", "others"],
)
def test_a_state_of_an_adapter_holds_no_frozen_base(root: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    ways = {name: make for name, make in _ways(root).items() if name in names}
    cases: dict[str, Any] = {name: partial(goes_on, make, tmp_path / name) for name, make in ways.items()}
    if "lora" in ways:
        cases["full"] = partial(goes_on, ways["lora"], tmp_path / "full", "FULL_STATE_DICT")
        for case in (an_old_state_opens, another_adapter_is_refused):
            cases[case.__name__] = partial(case, ways["lora"], tmp_path / case.__name__)
    found, _ = run_ranks(run_cases, 2, cases)
    for name in {"lora", "packed", "qlora"} & found.keys():
        stored = check_dcp(tmp_path / name / "state" / "pytorch_model_fsdp_0")
        assert stored and all(".lora_" in key for key in stored), name

    of_one = ways.keys() - {"pissa"}
    again = {name: partial(on_one_rank, ways[name], tmp_path / name, found[name][1]) for name in of_one}
    if "lora" in ways:
        base = _bytes_of(root / "large")
        assert found["full"][0] < found["lora"][0] < found["an_old_state_opens"] - base < base / 4
        again["old"] = partial(on_one_rank, ways["lora"], tmp_path / "an_old_state_opens", found["lora"][1])
    if "pissa" in ways:
        files = list((tmp_path / "pissa" / "state" / "pytorch_model_fsdp_0").glob("*.distcp"))
        assert sum(file.stat().st_size for file in files) > _bytes_of(root / "llama") / 2, "PiSSA changes the base"
    run_ranks(run_cases, 1, again)

    for name in of_one - {"packed", "qlora"}:  # the state names its base
        export_checkpoint(tmp_path / name / "state", tmp_path / name / "out")
        assert_same_tensors(*(load_file(tmp_path / name / folder / ADAPTER) for folder in ("out", "saved")))
