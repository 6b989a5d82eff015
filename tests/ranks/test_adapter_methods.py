"""The table of docs/adapters.md: methods of PEFT by the three roads, against PEFT on one process.

A cell of the table is either equal to PEFT in a step of training, or refused with the road that works.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_fsdp_tools import ConfigError, from_pretrained, make_accelerator
from tests._checkpoints import full
from tests._dist import run_cases, run_ranks
from tests._grids import fast_and_nightly, in_turn
from tests._training import train

IDS = torch.randint(3, 131, (4, 12), generator=torch.Generator().manual_seed(1))


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 3, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"], **options})


def other(kind: str, **options: Any) -> Any:
    return getattr(peft, kind)(**{"task_type": "CAUSAL_LM", **options})


def words(tokenizer: str) -> Any:
    text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "5 6 7", "tokenizer_name_or_path": tokenizer}
    return other("PromptTuningConfig", num_virtual_tokens=3, **text)


Q = {"target_modules": ["q_proj"]}
TIED = {"ensure_weight_tying": True}
EMBEDDING = {"target_modules": ["embed_tokens"]}
CPT = {"cpt_token_ids": [5, 6, 7, 8], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]}
WORKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "LoRA": ("llama", lambda: lora(lora_bias=True, rank_pattern={"q_proj": 2})),
    "LoRA, orthogonal": ("llama", lambda: lora(r=4, init_lora_weights="orthogonal")),
    "DoRA, of a tied embedding too": ("tied", lambda: lora(use_dora=True, target_modules=["embed_tokens", "q_proj"])),
    "trainable_token_indices": ("tied", lambda: lora(trainable_token_indices=[1, 2], **TIED)),
    "TrainableTokens": ("tied", lambda: other("TrainableTokensConfig", token_indices=[1], **EMBEDDING)),
    "modules_to_save": ("llama", lambda: lora(modules_to_save=["lm_head", "embed_tokens"])),
    "modules_to_save, tied": ("tied", lambda: lora(modules_to_save=["embed_tokens"], **TIED)),
    "VB-LoRA": ("llama", lambda: other("VBLoRAConfig", r=2, num_vectors=6, vector_length=4, **Q)),
    "Lily": ("llama", lambda: other("LilyConfig", r=3, **Q)),
    "prompt tuning by text": ("tied", lambda: words("tokenizer")),
    "CPT": ("llama", lambda: other("CPTConfig", **CPT)),
    "prefix tuning": ("llama", lambda: other("PrefixTuningConfig", num_virtual_tokens=3)),
    "p-tuning": ("llama", lambda: other("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8)),
    "adaption prompt": ("llama", lambda: other("AdaptionPromptConfig", adapter_len=3, adapter_layers=2)),
    "LoKr": ("llama", lambda: other("LoKrConfig", r=4, **Q)),
    "BOFT": ("llama", lambda: other("BOFTConfig", boft_block_size=4, **Q)),
    "RandLoRA": ("llama", lambda: other("RandLoraConfig", r=3, **Q)),
}
NEEDS_PLAIN: dict[str, tuple[str, Callable[[], Any]]] = {
    "PiSSA": ("llama", lambda: lora(init_lora_weights="pissa")),
    "OLoRA": ("llama", lambda: lora(init_lora_weights="olora")),
    "FRoD": ("llama", lambda: other("FrodConfig", **Q)),
    "DEFT": ("llama", lambda: other("DeftConfig", **Q)),
    "layer_replication": ("llama", lambda: lora(layer_replication=[[0, 2], [1, 2]])),
}
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "AdaLoRA": ("llama", lambda: other("AdaLoraConfig", r=3, total_step=10, tinit=1, tfinal=1, **Q)),
    "Shadow": ("llama", lambda: other("ShadowConfig")),
    "LoRA that ties views": ("tied", lambda: lora(target_modules=["embed_tokens"], **TIED)),
}
ROADS = ("plain model and prepare", "peft_config of from_pretrained", "get_peft_model on shards")


def _trained(model: Any, ids: torch.Tensor, accelerator: Any = None) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one step, and the weights after it."""
    optimizer = torch.optim.SGD([p for p in model.eval().parameters() if p.requires_grad], lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    (loss,) = train(model, optimizer, [{"input_ids": ids, "labels": ids}], accelerator=accelerator)
    return loss, {name: full(p) for name, p in model.named_parameters() if p.requires_grad}


def _adapted(road: str, folder: Path, config: Any, accelerator: Any) -> Any:
    torch.manual_seed(0)
    if road.startswith("peft_config"):
        return from_pretrained(folder, accelerator=accelerator, peft_config=config)
    plain = AutoModelForCausalLM.from_pretrained(folder) if road.startswith("plain") else None
    return get_peft_model(plain or from_pretrained(folder, accelerator=accelerator), config)


def _works(folder: Path, config: Callable[[], Any], road: str) -> None:
    expected = _trained(_adapted(ROADS[0], folder, config(), None), IDS)
    accelerator = make_accelerator(cpu=True)
    mine = IDS.chunk(dist.get_world_size())[dist.get_rank()]
    loss, weights = _trained(_adapted(road, folder, config(), accelerator), mine, accelerator)
    assert loss == pytest.approx(expected[0], abs=1e-5)
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=1e-5)


def _is_refused(folder: Path, config: Callable[[], Any], road: str, message: str) -> None:
    accelerator = make_accelerator(cpu=True)
    with pytest.raises(ConfigError, match=message):
        accelerator.prepare(_adapted(road, folder, config(), accelerator))


NEEDED = "adapter on the plain model"
INSTEAD = "Use LoraConfig|leave ensure_weight_tying out"


def _table(combinations: list[tuple[str, str]], folders: dict[str, Path]) -> None:
    cases: dict[str, Any] = {}
    for name, road in combinations:
        kind, config = (WORKS | NEEDS_PLAIN | REFUSED)[name]
        if name in WORKS or (name in NEEDS_PLAIN and road == ROADS[0]):
            cases[f"{name}, {road}"] = partial(_works, folders[kind], config, road)
        else:
            message = NEEDED if name in NEEDS_PLAIN else INSTEAD
            cases[f"{name}, {road}"] = partial(_is_refused, folders[kind], config, road, message)
    run_cases(cases)


def by_turns(*_: Any) -> list[tuple[str, str]]:
    """Each method by one road; one that needs a plain model by that and by another."""
    roads = [*in_turn(list(WORKS), ROADS), *in_turn(list(REFUSED), ROADS)]
    return [*roads, *((name, ROADS[0]) for name in NEEDS_PLAIN), *in_turn(list(NEEDS_PLAIN), ROADS[1:])]


@fast_and_nightly(by_turns, [*WORKS, *NEEDS_PLAIN, *REFUSED], ROADS)
def test_every_method_by_every_road_equals_peft_or_names_the_road(folders, tmp_path, monkeypatch, combinations):
    spelled = Tokenizer(models.WordLevel({str(index): index for index in range(131)}, unk_token="0"))
    spelled.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=spelled, pad_token="0").save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    run_ranks(_table, 2, combinations, folders)
