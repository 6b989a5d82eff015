"""A meta model is what `from_pretrained` would build, and what lives in no file comes from the model's own code."""

import json

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_fsdp_tools import CheckpointError, ConfigError
from hf_fsdp_tools.modeling.configs import model_class
from hf_fsdp_tools.steps import build_meta_model
from tests._checkpoints import make_checkpoint
from tests.api import allocate, initialize_missing

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31}


@pytest.mark.parametrize(("kind", "dtype"), [("tied", torch.bfloat16), ("deepseek_v3", None), ("t5", torch.float16)])
def test_same_tensors_as_from_pretrained(kind, dtype, tmp_path):
    """In the dtype of the config unless given; some modules of T5 stay in fp32 beside fp16."""
    make_checkpoint(kind, tmp_path, dtype=torch.bfloat16)
    cls = hf.AutoModelForSeq2SeqLM if kind == "t5" else hf.AutoModelForCausalLM
    plain = cls.from_pretrained(tmp_path, dtype=dtype)
    meta = build_meta_model(tmp_path, dtype=dtype)
    if kind != "deepseek_v3":  # of which 5.24 keeps a bias in fp32
        assert len({p.dtype for p in meta.parameters()}) == (2 if kind == "t5" else 1)
    described = lambda model: [(k, v.shape, v.dtype) for k, v in [*model.named_parameters(), *model.named_buffers()]]  # noqa: E731
    assert described(meta) == described(plain)
    assert type(meta) is type(plain)
    assert not meta.training
    assert all(tensor.is_meta for tensor in [*meta.parameters(), *meta.buffers()])


def test_errors_name_the_cure_and_a_bug_of_the_callers_class_shows(tmp_path):
    with pytest.raises(CheckpointError, match=r"No such folder.*/nowhere.*Give an existing"):
        build_meta_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"No config\.json in .*found: nothing"):
        build_meta_model(tmp_path)
    (tmp_path / "config.json").write_text("{ no json")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        build_meta_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    with pytest.raises(ConfigError, match="unheard_of"):
        build_meta_model(tmp_path)
    with pytest.raises(ConfigError, match="cannot make a model of this"):
        build_meta_model(hf.BertConfig(), auto_class=hf.AutoModelForSpeechSeq2Seq)
    with pytest.raises(ConfigError, match="flash: neither the config nor the model"):
        build_meta_model(hf.LlamaConfig(**TINY), flash=True)
    with pytest.raises(ConfigError, match=r"The LlamaConfig cannot be used to build .*RuntimeError.*Correct the conf"):
        build_meta_model(hf.LlamaConfig(**TINY | {"vocab_size": -3}))

    class Own(hf.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        build_meta_model(hf.LlamaConfig(**TINY), auto_class=Own)


def test_what_is_allocated_keeps_ties_and_what_nothing_fills_is_an_error():
    model = build_meta_model(hf.LlamaConfig(**TINY, tie_word_embeddings=True), dtype=torch.bfloat16)
    model.model.norm.weight.note = "kept"
    model.model.norm.weight.requires_grad_(False)
    allocate(model, device=torch.device("cpu"), dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.norm.weight.note == "kept" and not model.model.norm.weight.requires_grad
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    with torch.device("meta"):
        model = Odd()
    allocate(model, device=torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"table.*persistent"):
        initialize_missing(model, missing_keys=())
    model = get_peft_model(build_meta_model(hf.LlamaConfig(**TINY)), LoraConfig(r=2, target_modules=["q_proj"]))
    allocate(model, device=torch.device("cpu"))
    missing = [name for name in model.state_dict() if "lora_B" in name]
    with pytest.raises(CheckpointError, match=r"Adapter weights on meta.*lora_B.*let prepare\(\) shard it"):
        initialize_missing(model, missing_keys=missing)


@pytest.mark.parametrize(
    ("config", "auto_class"),
    [
        (hf.BertConfig(**TINY, max_position_embeddings=20), hf.AutoModel),
        (hf.Gemma3TextConfig(**TINY, head_dim=8, num_key_value_heads=1), hf.AutoModelForCausalLM),
    ],
)
def test_non_persistent_buffers_equal_a_model_built_the_plain_way(config, auto_class):
    plain = auto_class.from_config(config)
    model = build_meta_model(config, auto_class=auto_class)
    allocate(model, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    initialize_missing(model, missing_keys=())
    expected = dict(plain.named_buffers())
    assert expected
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert all((p == 7).all() for p in model.parameters()), "nothing but the missing may change"


def test_a_new_head_is_initialised_the_same_whatever_else_is_missing():
    config = hf.LlamaConfig(**TINY, num_labels=3, initializer_range=0.5)

    def head(missing, seed=0):
        model = build_meta_model(config, auto_class=hf.AutoModelForSequenceClassification)
        allocate(model, device=torch.device("cpu"))
        initialize_missing(model, missing_keys=missing, seed=seed)
        return model.score.weight.detach()

    alone = head({"score.weight"})
    assert torch.equal(alone, head({"score.weight", "model.layers.0.mlp.up_proj.weight"}))
    assert not torch.equal(alone, head({"score.weight"}, seed=1))
    assert 0.3 < alone.std() < 0.7, "drawn as the model's own code draws it"
    state = torch.get_rng_state()
    head({"score.weight"})
    assert torch.equal(state, torch.get_rng_state()), "the user's random state is left alone"


SMALLEST = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
"""A class that a config names, and such a config."""


BY_KIND = [
    (hf.LlamaConfig, hf.AutoModelForCausalLM),
    (hf.T5Config, hf.AutoModelForSeq2SeqLM),
    (hf.WhisperConfig, hf.AutoModelForSpeechSeq2Seq),
    (hf.BertConfig, hf.AutoModelForMaskedLM),
    (hf.ViTConfig, hf.AutoModelForImageClassification),
    (hf.Gemma3Config, hf.AutoModelForImageTextToText),
    (hf.CLIPConfig, hf.AutoModel),
    (hf.Wav2Vec2Config, hf.AutoModel),
]


@pytest.mark.parametrize(("config_class", "expected"), BY_KIND)
def test_without_a_class_that_can_be_trained_the_kind_decides(config_class, expected):
    config = config_class()
    assert model_class(config) is expected
    for damaged in ("Damaged", [None, 3], ["LlamaForCausalLMEagle"], ["AutoModel", "PreTrainedModel", "os"]):
        vars(config)["architectures"] = damaged  # to some versions of transformers an attribute cannot be set to it
        assert model_class(config) is expected, damaged
    base = hf.MODEL_MAPPING[config_class]
    config.architectures = [base.__name__]
    assert model_class(config) is (base if expected is hf.AutoModel else expected)
    assert model_class(config, as_stored=True) is base


def test_trusted_code_goes_first_and_what_the_caller_says_before_the_config():
    config = hf.LlamaConfig(**SMALLEST, architectures=["LlamaForCausalLM"])
    config.auto_map = {"AutoModel": "code.LlamaModel", "AutoModelForCausalLM": "code.LlamaForCausalLM"}
    assert model_class(config) is hf.LlamaForCausalLM
    assert model_class(config, trust_remote_code=True) is hf.AutoModelForCausalLM
    config.auto_map = {"AutoModelForCausalLM": "code.MyLlama"}
    assert model_class(config) is hf.LlamaForCausalLM
    assert model_class(config, trust_remote_code=True) is hf.AutoModelForCausalLM, "as transformers does"
    config.architectures = ["Absent"]
    config.auto_map = {"AutoModelForTokenClassification": "code.Absent"}
    assert model_class(config) is hf.AutoModelForTokenClassification, "whose error says what to trust"
    config = hf.LlamaConfig(**SMALLEST, architectures=["LlamaForSequenceClassification"])
    for given in ("AutoModelForCausalLM", hf.AutoModelForCausalLM, "LlamaForCausalLM", hf.LlamaForCausalLM):
        assert type(build_meta_model(config, auto_class=given)) is hf.LlamaForCausalLM
    with pytest.raises(ConfigError, match=r"'LlamaForCausalML' is no model class.* mean LlamaForCausalLM"):
        build_meta_model(config, auto_class="LlamaForCausalML")
    for wrong in (7, hf.LlamaConfig, "Trainer", build_meta_model):
        with pytest.raises(ConfigError, match="auto_class"):
            build_meta_model(config, auto_class=wrong)
    usual = "AutoModelForSpeechSeq2Seq cannot make a model of this LlamaConfig"
    with pytest.raises(ConfigError, match=usual):
        build_meta_model(config, auto_class="AutoModelForSpeechSeq2Seq")
