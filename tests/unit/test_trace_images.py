"""The dry run of models of text and images: images are in it, or a note says why not."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.foreseeing.cases import SIZES, case_named
from hf_fsdp_tools import ConfigError, TrainingSetup
from hf_fsdp_tools.foresight.tracing.images import NoImagesError, batch_of, images_of
from tests.api import Trace, build, trace_model

PLAIN = {
    "mixed_precision": "fp32",
    "wrapping": "root",
    "attn_implementation": "eager",
    "max_length": 32,
    "image_size": (56, 84),
}


def built(name: str, **fields):
    case = case_named(name)
    setup = TrainingSetup(**(PLAIN | fields))
    config = case.config(SIZES["tiny"])
    return config, case.auto_class, setup, *build(config, setup, auto_class=case.auto_class)


def traced(name: str, **fields) -> Trace:
    _, _, setup, model, plan = built(name, **fields)
    return trace_model(model, plan, setup, device="cpu")


def test_products_are_those_of_a_real_step_with_images(tokens=6):
    """Packed patches, positions of a grid."""
    config, auto_class, setup, model, plan = built("VLM, Qwen2.5-VL")
    try:
        images = images_of(model, setup)
    except NoImagesError as error:
        if "requires the Torchvision library" in str(error):  # which 5.17 asks for, and the extra for tests lacks
            pytest.skip("the image processor of this version of transformers needs torchvision")
        raise
    assert images.tokens == tokens
    estimated = trace_model(model, plan, setup, device="cpu")
    assert estimated.notes[0] == f"Images in each sequence: {images.count}, of {tokens} tokens each."
    real = auto_class.from_config(config, attn_implementation="eager").train()
    batch = {key: value.contiguous() for key, value in batch_of(real, setup, images).items()}
    with FlopCounterMode(display=False) as counter:
        real(**batch, use_cache=False).loss.backward()
    assert estimated.model_flops == counter.get_total_flops()


def test_a_frozen_tower_gets_no_gradient_and_its_projector_does():
    _, _, _, model, _ = built("VLM, LLaVA", freeze_vision_tower=True)
    frozen = {name.split(".")[1] for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {"vision_tower"}
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no vision tower"):
        built("dense", freeze_vision_tower=True)


def test_images_that_do_not_fit_into_the_sequence_are_refused_only_if_they_were_asked_for():
    with pytest.raises(ConfigError, match="9 × 6 tokens of images with marks are 73, and max_length is 32"):
        traced("VLM, Qwen2.5-VL", images=9)
    note, *_ = traced("VLM, Qwen2.5-VL", image_size=(224, 224)).notes
    assert note.startswith("Of text alone, without images") and "max_length is 32" in note
