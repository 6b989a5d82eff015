"""`from_pretrained`: the whole road on 1, 2 and 3 ranks equals the plain one, and bad input stops all ranks alike."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from hf_fsdp_tools import ParallelDims, WrapPolicy, from_pretrained
from tests._checkpoints import assert_same_model, full, make_checkpoint
from tests._dist import run_cases, run_ranks
from tests._rounding import assert_within
from tests.api import sharding_of

KINDS = ("llama", "tied", "gpt2", "mixtral")


def every_parameter_and_buffer_equals_plain_from_pretrained(folders, dtype, root):
    tied = 0
    for folder in (folders[kind] for kind in KINDS):
        model, report = from_pretrained(folder, dtype=dtype, output_loading_info=True)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert not model.training and model.generation_config.to_dict() == plain.generation_config.to_dict()
        assert_same_model(model, plain)
        tied += model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert not report.missing_keys and not report.unexpected_keys
        assert report.read_ratio <= 1.01
    assert tied == 2, "tied and gpt2 share one tensor, the others do not"


def all_new(folders, dtype, root):
    """Every parameter missing, in a model whose own code initialises deeper modules from its root."""
    model = from_pretrained(folders["gpt2"], load_kwargs={"ignore_mismatched_sizes": True}, n_embd=32)
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def initialisation_from_the_root_is_the_same_sharded_or_not(folder, alone, sharded):
    config = AutoConfig.from_pretrained(folder, n_embd=32)
    projections = torch.cat([value.flatten() for name, value in alone.items() if name.endswith("c_proj.weight")])
    expected = config.initializer_range / (2 * config.n_layer) ** 0.5
    assert 0.9 < projections.std() / expected < 1.1, "GPT-2 scales these down from its root"
    assert all(torch.equal(sharded[name], value) for name, value in alone.items())


def settings_reach_the_step_they_are_for(folders, dtype, root):
    folder = root / "llama in bf16"
    GenerationConfig(max_new_tokens=7, bos_token_id=1, eos_token_id=2).save_pretrained(folder)
    dist.barrier()
    mesh = ParallelDims(dp_replicate_size=2).build_mesh("cpu")
    model = from_pretrained(
        folder,
        mesh=mesh,
        policy=WrapPolicy(group_tail=False),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        activation_checkpointing=True,
        attn_implementation="eager",
    )
    sharding = sharding_of(model)
    assert sharding.mesh is mesh and sharding.activation_checkpointing
    assert not any("model.norm" in unit.modules for unit in sharding.plan.units)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "computing lower than that needs master weights"
    assert model.config._attn_implementation == "eager" and model.generation_config.max_new_tokens == 7
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    ids = torch.tensor([[3, 4, 5]])
    assert_within(model(input_ids=ids).logits, lambda: plain(input_ids=ids).logits)


CASES = (
    every_parameter_and_buffer_equals_plain_from_pretrained, all_new, settings_reach_the_step_they_are_for,
)  # fmt: skip


def test_the_whole_road_equals_the_plain_one(folders, tmp_path):
    make_checkpoint("llama", tmp_path / "llama in bf16", dtype=torch.bfloat16)
    (alone,) = run_ranks(run_cases, 1, CASES[:2], folders, None, tmp_path)
    for found in run_ranks(run_cases, 2, CASES, folders, torch.bfloat16, tmp_path):
        initialisation_from_the_root_is_the_same_sharded_or_not(folders["gpt2"], alone["all new"], found["all new"])
