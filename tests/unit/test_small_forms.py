"""Small forms of models that read images or sound train on these among words, and on packed rows of words alone."""

import pytest

from tests._checkpoints import RELEASE
from tests.api import telling, tiny_case, with_kinds
from tests.census.defaults import CONFIG_MAPPING, build_config
from tests.census.rows import model_classes

INPUTS = {
    "gemma3": "pixel_values",
    "gemma4": "pixel_values image_position_ids",
    "granite4_vision": "pixel_values image_sizes",  # tiles of several sizes, and what they add to layers of words
    "inkling2": "pixel_values image_grid_thw",  # patches with their channels last
    "instructblip": "pixel_values qformer_input_ids",
    "kimi_k25": "pixel_values image_grid_thw",  # patches as small images
    "llama4": "pixel_values",
    "llava_next": "pixel_values image_sizes",
    "mllama": "pixel_values aspect_ratio_ids aspect_ratio_mask cross_attention_mask",
    "qwen3_omni_moe_thinker": "pixel_values image_grid_thw input_features feature_attention_mask",
    "smolvlm": "pixel_values",  # images are lists of tiles
}


BROKEN = {"llama4": RELEASE == (5, 24) or RELEASE <= (5, 17), "granite4_vision": RELEASE <= (5, 17)}
"""What this transformers does not build or run by itself (benchmarks/reports/transformers_llama4_outputs.py)."""


@pytest.mark.parametrize("model_type", INPUTS)
def test_images_and_sound_are_among_the_words(model_type, tmp_path, request):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such type")
    broken = pytest.mark.xfail(BROKEN.get(model_type, False), reason="transformers does not run it", strict=True)
    request.applymarker(broken)
    config = telling(build_config(model_type))
    case, _ = tiny_case(config, model_classes(model_type, config), tmp_path / "checkpoint", is_training=True)
    (row, _) = case.batches["rows"]
    assert {*INPUTS[model_type].split(), "input_ids", "labels"} <= {*row}
    case, left_out = with_kinds(case)
    assert "padded" in case.batches
    assert ("packed" in case.batches) == (model_type != "instructblip"), left_out
    if "packed" in case.batches:
        assert {*case.batches["packed"][0]} - {"token_type_ids"} == {"input_ids", "labels", "position_ids", "use_cache"}
