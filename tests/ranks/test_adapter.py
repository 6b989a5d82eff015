"""Adapters on sharded models: the values, losses and files that PEFT alone gives, in the units of the base; and the
table of docs/adapters.md: methods of PEFT by three roads, each equal to PEFT or refused with the road that works."""

import json
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    ParallelDims,
    add_adapter,
    diagnose,
    from_pretrained,
    make_accelerator,
    save_pretrained,
)
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import (
    assert_same_tensors,
    full,
    full_state,
    make_checkpoint,
    make_model,
    tiny_config,
)
from tests._dist import run_cases, run_ranks
from tests._grids import fast_and_nightly, in_turn
from tests._noted import Operators
from tests._training import full_gradients, train
from tests.api import sharding_of

IDS = torch.arange(3, 19).reshape(1, 16)
# PEFT's expert weights have strides that grouped_mm refuses at this size.
MOE = {"experts_implementation": "batched_mm"}


def lora(**options) -> LoraConfig:
    return LoraConfig(**{"r": 3, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"], **options})


CASES = {
    "dora": ("llama", lambda: lora(use_dora=True)),
    "tied embedding and head": ("tied", lambda: lora(target_modules=["embed_tokens", "lm_head"])),
    "single tokens": ("tied", lambda: lora(trainable_token_indices=[1, 2])),
    "fused experts": ("mixtral", lambda: lora(target_parameters=["experts.gate_up_proj", "experts.down_proj"])),
    "prompt": ("llama", lambda: PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
}


def options(kind: str) -> dict:
    return MOE if kind == "mixtral" else {}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), dist.DistBackendError("NCCL"), ValueError("none")])
def test_errors_of_the_device_and_of_communication_are_not_put_down_to_the_adapter(monkeypatch, error):
    monkeypatch.setattr("peft.get_peft_model", Mock(side_effect=error))
    with pytest.raises(ConfigError if isinstance(error, ValueError) else type(error), match=str(error)):
        add_adapter(make_model("llama"), lora())


def plain_base(folder, kind="llama", dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options(kind))


def plain(folder, config, kind="llama", dtype=torch.float32) -> PeftModel:
    base = plain_base(folder, kind, dtype)
    torch.manual_seed(0)
    return get_peft_model(base, config).eval()


def grown(model) -> None:
    """Adapters start at nothing; give each a value that changes the output, the same however it is sharded."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name))
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None)
            with torch.no_grad():
                parameter.add_(noise)


def _one_case(kind: str, config: Callable[[], Any], folders: dict[str, Path], output: Path) -> None:
    folder, expected = folders[kind], plain(folders[kind], config(), kind)
    torch.manual_seed(0 if dist.get_rank() == 0 else 1)  # rank 0's counts
    model = from_pretrained(folder, peft_config=config(), **options(kind))
    assert not model.training
    assert_same_tensors(full_state(model), full_state(expected))
    for each in (model, expected):
        grown(each)
        each(input_ids=IDS, labels=IDS).loss.backward()
    torch.testing.assert_close(full_gradients(model), full_gradients(expected), rtol=1e-5, atol=1e-7)
    before, is_prompt = full_state(model), isinstance(config(), PromptTuningConfig)
    save_pretrained(model, output / "adapter")
    with pytest.raises(ConfigError, match="no adapter in its modules") if is_prompt else nullcontext():
        save_pretrained(model, output / "merged", merge_adapters=True)
    assert_same_tensors(full_state(model), before)
    if dist.get_rank() == 0:  # what is saved is what PEFT opens; merged, it is what PEFT merges
        reopened = PeftModel.from_pretrained(plain_base(folder, kind), output / "adapter")
        torch.testing.assert_close(reopened(input_ids=IDS).logits, expected(input_ids=IDS).logits, rtol=1e-6, atol=1e-6)
    if dist.get_rank() == 0 and not is_prompt:
        merged = expected.merge_and_unload()
        assert_same_tensors(full_state(plain_base(output / "merged", kind)), full_state(merged))
        assert AutoConfig.from_pretrained(output / "merged").tie_word_embeddings == merged.config.tie_word_embeddings
    frozen = from_pretrained(output / "adapter", **options(kind))
    assert_same_tensors(full_state(frozen), full_state(model))
    assert not any(each.requires_grad for name, each in frozen.named_parameters() if "lora" in name)


def the_class_of_base_that_it_was_trained_on_is_opened(folder: Path, output: Path) -> None:
    dora = {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]}
    for name, kind, task, more in (
        ("classifier", AutoModelForSequenceClassification, "SEQ_CLS", {}),
        ("no task", AutoModel, None, {}),
        ("DoRA of an embedding", AutoModelForCausalLM, "CAUSAL_LM", dora),
    ):
        classes = {"num_labels": 3} if name == "classifier" else {}
        torch.manual_seed(0)
        base = kind.from_pretrained(folder, **classes)
        if dist.get_rank() == 0:
            grown(adapted := get_peft_model(base, lora(task_type=task, **more)))
            adapted.save_pretrained(output / name)
        dist.barrier()
        expected = PeftModel.from_pretrained(kind.from_pretrained(folder, **classes), output / name)
        adapters = {key: value for key, value in full_state(expected).items() if "lora" in key or "to_save" in key}
        found = full_state(from_pretrained(output / name))
        assert_same_tensors({key: found.get(key) for key in adapters}, adapters)
        if kind is AutoModel:
            with pytest.raises(ConfigError, match="was trained on another class than LlamaForCausalLM"):
                from_pretrained(output / name, auto_class=AutoModelForCausalLM)


def _every_case(folders, output):
    run_cases({name: partial(_one_case, *case, folders, output / name) for name, case in CASES.items()})


def test_every_kind_of_adapter_is_that_of_peft_in_values_gradients_and_files(folders, tmp_path):
    run_ranks(_every_case, 2, folders, tmp_path / "out")


# ---- mixed precision ----


def fp32_adapters_train_on_a_bf16_base_in_its_units(folder, output):
    folder = output / "bf16"
    size = sum(t.numel() * 2 for t in plain_base(folder).state_dict().values())
    accelerator = make_accelerator(cpu=True, mixed_precision="bf16")
    config = lora(target_modules="all-linear", modules_to_save=["lm_head"])
    model, report = from_pretrained(folder, accelerator=accelerator, peft_config=config, output_loading_info=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    for _ in range(2):
        accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
        optimizer.step()
    assert not any(diagnose(model).findings), diagnose(model)
    names = [unit.modules for unit in sharding_of(model).plan.units]
    assert {("model.layers.0",), ("model.layers.1",), ("model.norm", "lm_head")} <= {*names} and names[-1] == ("",)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    learned = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16} and {p.dtype for p in learned} == {torch.float32}
    held = sum((p.to_local() if isinstance(p, DTensor) else p).untyped_storage().nbytes() for p in frozen)
    assert held < 0.6 * size, "half of the base, padding included, in its stored dtype"
    assert report.bytes_read <= 0.51 * size


def what_cannot_be_names_the_cure(folder, adapter):
    with pytest.raises(ConfigError, match=r"LORA adapter.*nowhere"):
        from_pretrained(folder, peft_config=lora(target_modules=["nowhere"]))
    for base, options, message in (
        (None, {}, "names no base model"),
        (str(folder), {"peft_config": lora()}, "asks for another"),
    ):
        if dist.get_rank() == 0:
            config = {"peft_type": "LORA", "base_model_name_or_path": base}
            (adapter / "adapter_config.json").write_text(json.dumps(config))
        dist.barrier()
        with pytest.raises((CheckpointError, ConfigError), match=message):
            from_pretrained(adapter, **options)
    if dist.get_rank() == 0:
        larger = plain_base(folder)
        larger.resize_token_embeddings(140, mean_resizing=False)
        get_peft_model(larger, lora()).save_pretrained(adapter / "larger")
    dist.barrier()
    with pytest.raises(ConfigError, match="trained on a base with 140 tokens: give that, or num_tokens=140"):
        from_pretrained(adapter / "larger")
    sharded = from_pretrained(folder)
    for asked in (
        partial(get_peft_model, sharded, lora()),
        partial(PeftModel.from_pretrained, sharded, adapter / "larger"),
    ):
        if dist.get_rank() == 0:  # before anything is communicated
            with pytest.raises(
                ConfigError, match=r"given a LlamaForCausalLM that is sharded.*add_adapter.*load_adapter"
            ):
                asked()
    add_adapter(sharded, lora())  # as it was
    plain_model = plain_base(folder)
    try:
        plain_model.add_adapter(lora())
    except ValueError as error:  # transformers 5.24 does it with PEFT 0.22, which is not out
        assert "use a version >= 0.22" in str(error)
        return
    with pytest.raises(ConfigError, match="get_peft_model"):
        save_pretrained(plain_model, adapter / "out")


def weights_of_experts_without_an_adapter_are_named(folder: Path, out: Path) -> None:
    said = r"\d\d% of the weights get no adapter.*target_parameters=\['experts.down_proj', 'experts.gate_up_proj'\]"
    for kind in ("gpt_oss", "mixtral"):  # PEFT finds the second's experts by itself
        plain = AutoModelForCausalLM.from_config(tiny_config(kind))
        model = shard_model(plain, make_wrap_plan(plain))
        with warnings.catch_warnings(record=True, action="always") as caught:
            add_adapter(model, LoraConfig(r=2, target_modules="all-linear"))
        found = [each for each in caught if re.search(said, str(each.message))]
        assert len(found) == (kind == "gpt_oss" and dist.get_rank() == 0), kind


def _copied_bytes(func: Any, *args: Any) -> int:
    is_copy = func is torch.ops.aten.copy_.default and args[0].data_ptr() != args[1].data_ptr()
    return args[0].nbytes if is_copy else 0


def frozen_weights_are_not_copied_where_nothing_is_gathered(folder: Path, output: Path) -> None:
    """FSDP2 copies what it would gather in forward, and what it freed in backward."""
    options = {"dtype": torch.bfloat16, "mp_policy": "bf16", "peft_config": lora(target_modules=["q_proj"])}
    model = from_pretrained(folder, mesh=ParallelDims(dp_replicate_size=2), **options).train()
    for _ in range(2):
        with Operators(_copied_bytes) as copies:
            model(input_ids=IDS, labels=IDS).loss.backward()
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    assert copies.sum / frozen < 0.2


def passes_with_the_adapter_off_change_no_gradient(folder: Path, output: Path) -> None:
    """As DPO runs them: the base alone, before the policy, or between its forward and its backward pass."""
    config = lora(modules_to_save=["lm_head"])  # its frozen original never runs
    for mp_policy in (None, "bf16"):
        found = []
        for before, between in ((0, 0), (1, 0), (0, 2)):
            torch.manual_seed(0)
            model = from_pretrained(folder, peft_config=config, mp_policy=mp_policy)
            with torch.no_grad(), model.disable_adapter():
                [model(input_ids=IDS) for _ in range(before)]
            loss = model(input_ids=IDS, labels=IDS).loss
            with torch.no_grad(), model.disable_adapter():
                [model(input_ids=IDS) for _ in range(between)]
            loss.backward()
            found.append(full_gradients(model))
        for gradients in found[1:]:
            assert_same_tensors(gradients, found[0])


CASES_OF_TWO = (
    frozen_weights_are_not_copied_where_nothing_is_gathered, the_class_of_base_that_it_was_trained_on_is_opened,
    fp32_adapters_train_on_a_bf16_base_in_its_units, what_cannot_be_names_the_cure,
    weights_of_experts_without_an_adapter_are_named, passes_with_the_adapter_off_change_no_gradient,
)  # fmt: skip


def test_adapters_train_in_the_units_of_their_base_and_what_cannot_be_done_is_refused(folders, tmp_path):
    make_checkpoint("llama", tmp_path / "bf16", dtype=torch.bfloat16)
    run_ranks(run_cases, 2, CASES_OF_TWO, folders["llama"], tmp_path)


# ---- methods by three roads ----

WORDS = torch.randint(3, 131, (4, 12), generator=torch.Generator().manual_seed(1))


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
    "IA3": ("llama", lambda: other("IA3Config", target_modules=["down_proj"], feedforward_modules=["down_proj"])),
    "VeRA": ("llama", lambda: other("VeraConfig", r=4, **Q)),
    "LoHa": ("llama", lambda: other("LoHaConfig", r=4, **Q)),
    "OFT": ("llama", lambda: other("OFTConfig", oft_block_size=4, **Q)),
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
ROADS = ("plain model and prepare", "peft_config of from_pretrained", "add_adapter on shards")


def _trained(model: Any, ids: torch.Tensor, accelerator: Any = None) -> tuple[float, dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD([p for p in model.eval().parameters() if p.requires_grad], lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    (loss,) = train(model, optimizer, [{"input_ids": ids, "labels": ids}], accelerator=accelerator)
    return loss, {name: full(p) for name, p in model.named_parameters() if p.requires_grad}


def _adapted(road: str, folder: Path, config: Any, accelerator: Any) -> Any:
    torch.manual_seed(0)
    if road.startswith("peft_config"):
        return from_pretrained(folder, accelerator=accelerator, peft_config=config)
    if road.startswith("plain"):
        return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    return add_adapter(from_pretrained(folder, accelerator=accelerator), config)


def _works(folder: Path, config: Callable[[], Any], road: str) -> None:
    accelerator = make_accelerator(cpu=True)
    mine = WORDS.chunk(dist.get_world_size())[dist.get_rank()]
    loss, weights = _trained(_adapted(road, folder, config(), accelerator), mine, accelerator)
    if dist.get_rank():
        return  # both have the same
    expected = _trained(_adapted(ROADS[0], folder, config(), None), WORDS)
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


RARE_METHODS = ("LoRA, orthogonal", "TrainableTokens", "Lily", "p-tuning", "LoKr", "BOFT", "RandLoRA", "OLoRA", "DEFT")
RARE_METHODS += ("DoRA, of a tied embedding too", "trainable_token_indices", "prompt tuning by text")  # see `CASES`
RARE_METHODS += ("IA3", "VeRA", "LoHa", "OFT")


def by_turns(*_: Any) -> list[tuple[str, str]]:
    """Each method but the rare ones by one road; one that needs a plain model by that and by another."""
    works, needs = ([name for name in table if name not in RARE_METHODS] for table in (WORKS, NEEDS_PLAIN))
    roads = [*in_turn(works, ROADS), *in_turn(list(REFUSED), ROADS)]
    return [*roads, *((name, ROADS[0]) for name in needs), *in_turn(needs, ROADS[1:])]


@fast_and_nightly(by_turns, [*WORKS, *NEEDS_PLAIN, *REFUSED], ROADS)
def test_every_method_by_every_road_equals_peft_or_names_the_road(folders, tmp_path, monkeypatch, combinations):
    spelled = Tokenizer(models.WordLevel({str(index): index for index in range(131)}, unk_token="0"))
    spelled.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=spelled, pad_token="0").save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    run_ranks(_table, 2, combinations, folders)
