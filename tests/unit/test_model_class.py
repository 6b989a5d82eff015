"""The class of a model: the one that its config names, where that can be trained, else that of its kind."""

import pytest
import transformers as hf

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.modeling.configs import model_class
from hf_fsdp_tools.steps import build_meta_model

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
SMALL = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}  # fmt: skip

BUILT = {
    "T5ForConditionalGeneration": hf.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=64),
    "WhisperForConditionalGeneration": hf.WhisperConfig(**SMALL, vocab_size=64, pad_token_id=0),
    "BertForPreTraining": hf.BertConfig(**TINY),
    "LlamaForSequenceClassification": hf.LlamaConfig(**TINY),
    "CLIPModel": hf.CLIPConfig(),
    "Qwen2_5_VLForConditionalGeneration": hf.Qwen2_5_VLConfig(),
    "VisionEncoderDecoderModel": hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**{**TINY, "image_size": 32}), hf.BertConfig(**TINY, is_decoder=True, add_cross_attention=True)
    ),
}
"""A class that a config names, and such a config."""


@pytest.mark.parametrize("name", BUILT)
def test_a_config_names_the_class_that_is_built(name):
    config = BUILT[name]
    config.architectures = [name]
    assert type(build_meta_model(config)).__name__ == name
    config.architectures = [f"FSDP{name}"]  # as sharded models were once saved
    assert model_class(config) is getattr(hf, name)


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
    config = hf.LlamaConfig(**TINY, architectures=["LlamaForCausalLM"])
    config.auto_map = {"AutoModel": "code.LlamaModel", "AutoModelForCausalLM": "code.LlamaForCausalLM"}
    assert model_class(config) is hf.LlamaForCausalLM
    assert model_class(config, trust_remote_code=True) is hf.AutoModelForCausalLM
    config.auto_map = {"AutoModelForCausalLM": "code.MyLlama"}
    assert model_class(config) is hf.LlamaForCausalLM
    assert model_class(config, trust_remote_code=True) is hf.AutoModelForCausalLM, "as transformers does"
    config.architectures = ["Absent"]
    config.auto_map = {"AutoModelForTokenClassification": "code.Absent"}
    assert model_class(config) is hf.AutoModelForTokenClassification, "whose error says what to trust"
    config = hf.LlamaConfig(**TINY, architectures=["LlamaForSequenceClassification"])
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
