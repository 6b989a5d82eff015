"""What somebody new gives to the public functions and does with a sharded model, in one process: it is understood, or
named in one sentence with its cure."""

import inspect
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from peft import LoraConfig
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

import hf_fsdp_tools
from hf_fsdp_tools import (
    ConfigError,
    FSDPToolsError,
    FSDPTrainerMixin,
    HybridPolicy,
    ParallelDims,
    build_meta_model,
    from_pretrained,
    make_accelerator,
    make_wrap_plan,
    save_pretrained,
    sharding_of,
)
from tests._checkpoints import full_state, make_checkpoint, make_model

IDS = torch.arange(3, 11)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(autouse=True)
def without_accelerator() -> Any:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# ---- arguments ----


def public_arguments() -> list[tuple[str, str]]:
    """Arguments of the public functions that have a kind which a caller can mistake."""
    kinds = ("bool", "nn.modules.module.Module", "HybridPolicy", "DeviceMesh", "PrecisionPolicy", "OffloadPolicy")
    found = []
    for name in hf_fsdp_tools.__all__:
        value = getattr(hf_fsdp_tools, name)
        if inspect.isfunction(value):
            parameters = inspect.signature(value).parameters.values()
            found += [(name, p.name) for p in parameters if any(kind in str(p.annotation) for kind in kinds)]
    of_their_own = {"name_or_model", "param_init_fn"}  # a name, a config or a model; any callable
    return [(name, argument) for name, argument in found if argument not in of_their_own]


@pytest.mark.parametrize(("name", "argument"), public_arguments())
def test_a_value_of_another_kind_is_one_sentence(name: str, argument: str) -> None:
    function = getattr(hf_fsdp_tools, name)
    needed = {
        p.name: "x"
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }
    sound = {"model": make_model("llama"), "plan": make_wrap_plan(make_model("llama"))}
    given = {key: sound.get(key, value) for key, value in needed.items()} | {argument: 3.5}
    with pytest.raises(FSDPToolsError, match=rf"^{argument} is 3\.5: ") as caught:
        function(**given)
    assert caught.value.__cause__ is None and "\n" not in str(caught.value)


UNDERSTOOD: list[tuple[dict[str, Any], Any]] = [
    ({"dtype": "bf16"}, lambda model: model.dtype == torch.bfloat16),
    ({"torch_dtype": "fp16"}, lambda model: model.dtype == torch.float16),
    ({"auto_class": "LlamaForSequenceClassification"}, lambda model: type(model).__name__.endswith("Classification")),
    ({"policy": "LlamaAttention"}, lambda model: "LlamaAttention" in str(sharding_of(model).plan)),
    ({"policy": {"replicate": ("lm_head",)}}, lambda model: sharding_of(model).plan.replicated == ("lm_head.weight",)),
    ({"mesh": ParallelDims()}, lambda model: sharding_of(model).mesh.ndim == 1),
    ({"mp_policy": "bf16"}, lambda model: sharding_of(model).mp_policy.param_dtype == torch.bfloat16),
    (
        {"mp_policy": MixedPrecisionPolicy(param_dtype="bfloat16")},  # type: ignore[arg-type]  # as a YAML gives it
        lambda model: sharding_of(model).mp_policy.param_dtype == torch.bfloat16,
    ),
    ({"offload_policy": True}, lambda model: isinstance(sharding_of(model).offload_policy, CPUOffloadPolicy)),
    ({"num_tokens": "140", "pad_to_multiple_of": 8.0}, lambda model: model.config.vocab_size == 144),
    ({"peft_config": {"r": 3}}, lambda model: model.peft_config["default"].r == 3),
    ({"compile": "eager"}, lambda model: sharding_of(model).compile == {"backend": "eager"}),
    ({"low_cpu_mem_usage": True, "load_in_8bit": False, "_fast_init": True}, lambda model: True),
]


@pytest.mark.parametrize(("given", "holds"), UNDERSTOOD, ids=[str(given) for given, _ in UNDERSTOOD])
def test_what_is_clear_is_understood(folder: Path, given: dict[str, Any], holds: Any) -> None:
    assert holds(from_pretrained(folder, **given))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"acelerator": None}, r"no argument 'acelerator': did you mean accelerator\?"),
    ({"revison": "x"}, r"no argument 'revison': did you mean revision"),
    ({"num_label": 3}, r"no argument 'num_label': did you mean num_labels\?"),
    ({"seed": 1}, r"load_weights has: pass load_kwargs={'seed': …}\."),
    ({"gradient_checkpointing": True}, r"gradient_checkpointing=True \(Pass activation_checkpointing=True\)"),
    ({"load_in_8bit": True}, r"load_in_8bit=True \(Give quantization_config=BitsAndBytesConfig\(load_in_4bit=True"),
    ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, r"=BitsAndBytesConfig\(load_in_8bit=True\) cann"),
    ({"auto_class": "AutoModelForCasualLM"}, r"no model class of transformers.*AutoModelForCausalLM"),
    ({"auto_class": "AutoModelForSpeechSeq2Seq"}, r"its usual class, LlamaForCausalLM, as auto_class"),
    ({"policy": HybridPolicy}, r"policy is the class HybridPolicy: it must be a HybridPolicy\(…\)"),
    ({"policy": {"block_type": ()}}, r"policy has no 'block_type': did you mean block_types\?"),
    ({"peft_config": {"rank": 8}}, r"peft_config has no 'rank'.*LoraConfig of PEFT"),
    ({"peft_config": {"peft_type": "LORRA"}}, r"peft_type 'LORRA', which PEFT has not: did you mean LORA"),
    ({"num_tokens": [1]}, r"num_tokens is \[1\]; it must be a whole number.*Give len\(tokenizer\)"),
    ({"pad_to_multiple_of": 0}, r"pad_to_multiple_of is 0; it must be at least 1"),
    ({"dtype": torch.float8_e4m3fn}, r"cannot be built in float8_e4m3fn"),
    ({"accelerator": "cpu"}, r"accelerator is 'cpu': it must be an Accelerator"),
    ({"config": {"a": 1}}, r"config is {'a': 1}: it must be a configuration of transformers"),
    ({"load_kwargs": ["seed"]}, r"load_kwargs is \['seed'\]: it must be a dict"),
    ({"compile": "inducter"}, r"compile='inducter' is no backend of torch.compile: did you mean inductor\?"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_not_is_named_once(folder: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        from_pretrained(folder, **given)
    assert caught.value.__cause__ is None and (caught.value.__context__ is None or caught.value.__suppress_context__)
    assert "?." not in str(caught.value)


def test_a_name_in_place_of_a_model_says_how_to_make_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model is 'org/name', a name.*from_pretrained\('org/name'\)"):
        make_wrap_plan("org/name")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"plan is None: it must be a WrapPlan\. Make one with make_wrap_plan"):
        hf_fsdp_tools.shard_model(make_model("llama"), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="A model that is there already is sharded by shard_model"):
        from_pretrained(make_model("llama"))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"shard_model\(\) missing 1 required positional argument: 'plan'"):
        hf_fsdp_tools.shard_model(make_model("llama"))  # type: ignore[call-arg]
    assert build_meta_model(folder, dtype="fp32").dtype == torch.float32  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mixed_precison": "bf16"}, "no argument 'mixed_precison': did you mean mixed_precision"),
        ({"mixed_precision": "bf61"}, "mixed_precision='bf61' is no floating-point dtype"),
        ({"dynamo_backend": "indctor"}, "backend of torch.compile is 'indctor': unknown: did you mean inductor"),
        ({"gradient_accumulation_steps": "four"}, "gradient_accumulation_steps is 'four'; it must be a whole number"),
    ],
)
def test_an_accelerator_is_refused_before_anything_is_loaded(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_accelerator(**given)


def test_fp16_on_a_cpu_is_named_before_anything_is_loaded() -> None:
    with pytest.warns(UserWarning, match="'fp16' needs a scaled loss.*evaluation works.*Use 'bf16'"):
        make_accelerator(mixed_precision="fp16")


def test_names_of_torch_are_names_of_precisions() -> None:
    accelerator = make_accelerator(
        mixed_precision="bfloat16", gradient_accumulation_steps="2", dynamo_backend=DynamoBackend.EAGER
    )
    assert accelerator.mixed_precision == "bf16" and accelerator.state.dynamo_plugin.backend is DynamoBackend.EAGER


# ---- a sharded model ----


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", max_steps=2, disable_tqdm=True, **settings
    )


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": IDS[0], "labels": IDS[0]} for _ in range(8)]


def test_a_plain_trainer_or_accelerator_around_shards_is_named(folder: Path, tmp_path: Path) -> None:
    """Both trained without a word in one process, so that the mistake showed on the cluster first."""
    lora = LoraConfig(target_modules=["q_proj"])
    for model in (from_pretrained(folder), from_pretrained(folder, peft_config=lora)):
        trainer = Trainer(model, arguments(tmp_path), train_dataset=rows())
        with pytest.raises(ConfigError, match=r"LlamaForCausalLM is sharded.*put FSDPTrainerMixin before the Trainer"):
            trainer.train()
    model = from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"In a loop, make the Accelerator with make_accelerator\(\)"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters()))


def test_the_mixin_after_the_trainer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"class Late\(Trainer, FSDPTrainerMixin\).*Late\(FSDPTrainerMixin, Trainer"):

        class Late(Trainer, FSDPTrainerMixin):
            pass


def test_the_first_training_pass_says_what_was_done_to_the_shards(folder: Path) -> None:
    model = from_pretrained(folder).half().train()
    long = torch.ones(1, 80, dtype=torch.long)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.no_grad():
            model(long)
        assert not [warning for warning in told if "positions" in str(warning.message)]
        model(long)
        model(long)
    said = " ".join(str(warning.message) for warning in told)
    assert said.count("weights of LlamaForCausalLM are float16") == 1
    assert said.count("sequences of 80 tokens, and LlamaForCausalLM has 64 positions") == 1


def test_sequences_that_are_packed_into_a_row_are_not_too_long(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    model = from_pretrained(folder).train()
    model(torch.ones(1, 80, dtype=torch.long), position_ids=torch.arange(40).repeat(2)[None])
    assert not [warning for warning in recwarn if "positions" in str(warning.message)]


def test_torch_save_of_a_sharded_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch\.save would pickle.*Call save_pretrained\(model, folder\)"):
        torch.save(from_pretrained(folder), tmp_path / "model.pt")


def test_the_report_of_keys_has_no_escape_codes_in_a_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        from_pretrained(folder, auto_class="LlamaForSequenceClassification")
    finally:
        library.removeHandler(caplog.handler)
    assert "LOAD REPORT" in caplog.text and "\x1b" not in caplog.text


# ---- folders that hold something else ----


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


def lora_of(folder: Path) -> Any:
    torch.manual_seed(3)
    return from_pretrained(folder, peft_config=LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))


def test_a_reused_folder_opens_as_what_was_saved_last(folder: Path, tmp_path: Path) -> None:
    """By plain transformers, and by this package; what is the user's own stays."""
    full, adapted = from_pretrained(folder), lora_of(folder)
    with torch.no_grad():
        full.lm_head.weight.mul_(2)
    (tmp_path / "notes.txt").write_text("mine")
    for model in (full, adapted, full, adapted):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_pretrained(model, tmp_path)
        for opened in (AutoModelForCausalLM.from_pretrained(tmp_path), from_pretrained(tmp_path)):
            assert torch.allclose(logits(opened), logits(model), atol=1e-5)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_gathered_state_dict_is_not_put_beside_another_kind_of_model(folder: Path, tmp_path: Path) -> None:
    full, adapted = from_pretrained(folder), lora_of(folder)
    save_pretrained(adapted, tmp_path)
    with pytest.raises(ConfigError, match=r"holds another kind of model, whose adapter_config\.json.*Leave state_dict"):
        full.save_pretrained(tmp_path, state_dict=full_state(full))
    assert not (tmp_path / "config.json").exists()


class ShardedTrainer(FSDPTrainerMixin, Trainer):
    """A Trainer on shards."""


def test_an_adapter_resumes_where_an_earlier_run_left_full_weights(folder: Path, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ShardedTrainer(from_pretrained(folder), arguments(tmp_path, **settings), train_dataset=rows()).train()
        whole = lora_of(folder)
        ShardedTrainer(whole, arguments(tmp_path, **settings), train_dataset=rows()).train()
    assert not (tmp_path / "checkpoint-1/model.safetensors").exists()
    shutil.rmtree(tmp_path / "checkpoint-2")
    again = lora_of(folder)
    ShardedTrainer(again, arguments(tmp_path, **settings), train_dataset=rows()).train(resume_from_checkpoint=True)
    for name, tensor in full_state(whole).items():
        assert torch.equal(tensor, full_state(again)[name]), name
