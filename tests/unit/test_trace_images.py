"""The dry run of models of text and images: images are in it, or a note says why not."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.foreseeing.cases import SIZES, case_named
from hf_fsdp_tools import ConfigError, TrainingSetup
from hf_fsdp_tools.foresight.tracing.images import NoImagesError, Values, batch_of, images_of
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


@pytest.mark.parametrize(
    ("name", "tokens", "fields"),
    [
        ("VLM, Qwen2.5-VL", 6, {}),
        pytest.param("VLM, Gemma 3", 4, {"per_device_train_batch_size": 2, "images": 2}, marks=pytest.mark.nightly),
    ],
)
def test_products_are_those_of_a_real_step_with_images(name, tokens, fields):
    """Packed patches, positions of a grid, masks of images, tiles that are left out."""
    config, auto_class, setup, model, plan = built(name, **fields)
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


def test_images_that_cannot_be_followed_are_left_out_and_the_note_says_where(monkeypatch):
    _, _, setup, model, plan = built("VLM, LLaVA")
    forward = type(model.model.multi_modal_projector).forward

    def reads_values(self, features):
        return forward(self, features if features.sum().item() else -features)

    monkeypatch.setattr(type(model.model.multi_modal_projector), "forward", reads_values)
    note, *_ = trace_model(model, plan, setup).notes
    assert note.startswith("Of text alone, without images, which take memory too: Data")


def test_values_follow_from_the_batch_until_something_unknown_is_written():
    with FakeTensorMode(allow_non_fake_inputs=True), Values():
        ids = torch.tensor([[5, 9, 9, 5]])
        hidden = torch.empty(1, 4, 8)
        mask = ids == 9
        assert mask.sum().item() == 2 and mask.nonzero().tolist() == [[0, 1], [0, 2]]
        assert hidden[mask].shape == (2, 8)
        assert torch.tensor([mask.sum(), 7]).tolist() == [2, 7]
        row = ids[0]
        row[1:] += 1
        assert ids.tolist() == [[5, 10, 10, 6]]
        with pytest.raises(DataDependentOutputException):
            row[:1] = hidden.argmax().reshape(1)
        with pytest.raises(DataDependentOutputException):
            hidden.sum().item()
