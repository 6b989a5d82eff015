"""`hf-fsdp verify`: right layouts are verified, and each kind of fault is found, named by check and module.

Faults are put into the ranks' own code: a wrong divisor, a dropped mask, rows exchanged between ranks, labels that are
not shifted, angles of other positions, collectives that are left out; swapped experts, tokens at the wrong rank, a
stale scale of a shard, a norm that is counted twice; parts of a state that are not brought back, a copy of a head that
does not run, an optimizer of other tensors, a base model alone that changes a weight.
"""

import json
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.scheduler import AcceleratedScheduler
from peft.utils.other import ModulesToSaveWrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hf_fsdp_tools import ParallelDims, pretrained
from hf_fsdp_tools.extensions import context_parallel as cp
from hf_fsdp_tools.extensions import readers
from hf_fsdp_tools.integrations import accelerator
from hf_fsdp_tools.proof import compare
from hf_fsdp_tools.proof.run import examine_on_rank, make_proof
from hf_fsdp_tools.sharding import replicated
from tests._dist import run_cases, run_ranks
from tests.api import PRECISIONS, WORDS, Held, Proof, main, plain_figures, telling, tiny_case, with_adapter, with_kinds

AllToAllEP = pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers 5.21 has it"
).AllToAllEP

LAYOUT = {"num_processes": 2, "dp_shard_size": 1, "cp_size": 2, "fsdp_version": 2, "adapter": False}


def _case(folder, config, dims, precisions=("fp32",), *, has_adapter=False):
    cls = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    options = {"num_batches": 2 // dims.ranks_per_row, "words": WORDS, "is_training": True, "tp_size": dims.tp_size}
    case, _ = tiny_case(telling(config), [cls], folder / "checkpoint", **options)
    if dims.cp_size > 1:
        case, _ = with_kinds(case)
        assert list(case.batches) == ["rows", "padded", "packed", "long"]
    case = replace(with_adapter(case) if has_adapter else case, dims=dims)
    torch.save((case, {each: plain_figures(case, each) for each in precisions}), folder / "plain.pt")


def _seen(folder, fault=None):
    with patch.object(*fault) if fault else nullcontext():
        return examine_on_rank(folder)


def _proof(ranks):
    return make_proof({"class": "", "parameters": 0, "inputs": ""}, LAYOUT, ranks, {})


# ---- faults of ranks that share rows ----


def _twice_the_loss(inner, *args, **kwargs):
    return 2 * _LOSS(inner, *args, **kwargs)


def _no_mask(module, query, key, value, attention_mask, *args, **kwargs):
    return _ATTEND(module, query, key, value, None, *args, **kwargs)


def _exchanged(rows, to_ranks, dim):
    return _FROM_ALL(rows, to_ranks.flip(0) if dim == 2 else to_ranks, dim)


def _not_shifted(model, args, kwargs, **options):
    labels = {"shift_labels": kwargs["labels"]} if kwargs.get("labels") is not None else {}
    return _BEFORE_MODEL(model, args, kwargs | labels, **options)


def _stale_positions(name, value, length, part):
    first = cp.Rows(None, 0, part.__self__.size).part if name == "position_embeddings" else part
    return _OF_TOKENS(name, value, length, first)


def _without_exchange(rows, to_ranks, dim):
    return torch.cat(to_ranks.unbind(), dim)


def _without_backward(rows, to_ranks, dim):
    return _FROM_ALL(rows, to_ranks.detach(), dim)


def _without(name, model, args, kwargs, **options):
    return _BEFORE_MODEL(model, args, {key: value for key, value in kwargs.items() if key != name}, **options)


def _stale_beyond(name, value, length, part):
    return (_stale_positions if length > 16 else _OF_TOKENS)(name, value, length, part)


def _last_micro_batch_alone(group, *unused):
    for entry in group.fsdp_params:
        entry.sharded_param.grad = None
    return _POST_BACKWARD(group, *unused)


_POST_BACKWARD = FSDPParamGroup.post_backward
_LOSS, _ATTEND, _FROM_ALL = cp._loss_of_part, readers._attend, cp.Rows._from_all
_BEFORE_MODEL, _OF_TOKENS = cp._before_model, cp.of_tokens
FAULTS = {
    "wrong divisor": ((cp, "_loss_of_part", _twice_the_loss), "loss: ", ""),
    "dropped mask": ((readers, "_attend", _no_mask), "packed rows: loss: ", ""),
    "rows exchanged": ((cp.Rows, "_from_all", _exchanged), "loss: ", "self_attn"),
    "labels not shifted": ((cp, "_before_model", _not_shifted), "loss: ", ""),
    "stale position ids": ((cp, "of_tokens", _stale_positions), "loss: ", "layers.0.self_attn"),
    "missing collective": ((cp.Rows, "_from_all", _without_exchange), "loss: ", "layers.0.self_attn"),
    "count ignored": ((cp, "_before_model", partial(_without, "num_items_in_batch")), "long rows: loss: ", ""),
    "shifted labels ignored": ((cp, "_before_model", partial(_without, "shift_labels")), "long rows: loss: ", ""),
    "wrong after 16 words": ((cp, "of_tokens", _stale_beyond), "long rows: loss: ", ""),
    "first micro-batch dropped": (
        (FSDPParamGroup, "post_backward", _last_micro_batch_alone),
        "gradients of two micro-batches: ",
        "",
    ),
    "missing collective in backward": ((cp.Rows, "_from_all", _without_backward), "gradients: ", ""),
}


# ---- faults of ranks that share experts, or layers ----


def _wrong_number(inner, experts, ranks):
    inner(experts, ranks / 2)  # that of the ranks which hold the same experts


def _other_experts(inner, self, *args):
    tokens, experts, weights, state = inner(self, *args)
    return tokens, self.num_local_experts - 1 - experts, weights, state


def _other_ranks(inner, self, hidden_states, index, weights):
    experts = self.num_local_experts * self.ep_mesh.size()
    return inner(self, hidden_states, (index + self.num_local_experts) % experts, weights)


def _with_stale_scale(name, model, index, **kwargs):
    report = _LOAD(model, index, **kwargs)
    if dist.get_rank() == 1:  # its shard alone; the other rank's is right
        Held.of(model.get_parameter(name)).memory.mul_(1.25)
    return report


def _counted_twice(gradients, order):
    return _NORM(gradients, order) * 2 ** (1 / order)


def _patched(target, name, fault):
    inner = getattr(target, name)
    return target, name, lambda *args, **kwargs: fault(inner, *args, **kwargs)


_LOAD, _NORM = pretrained.load_weights, replicated._norm_of
EXPERTS, UP = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.up_proj.weight"
OF_EXPERTS = {
    "wrong divisor": (
        _patched(FSDPModule, "set_gradient_divide_factor", _wrong_number),
        r"gradients: model\.layers\.\d\.mlp\.experts",
        "",
    ),
    "swapped expert": (
        _patched(AllToAllEP, "_dispatch_tokens", _other_experts),
        "loss: ",
        "layers.0.mlp.experts",
    ),
    "wrong rank": (_patched(AllToAllEP, "_dispatch_tokens", _other_ranks), "loss: ", "layers.0.mlp.experts"),
    "stale scale": (
        (pretrained, "load_weights", partial(_with_stale_scale, EXPERTS)),
        f"loaded weights: 1 tensors differ, {EXPERTS} first",
        "layers.0.mlp.experts",
    ),
    "norm counted twice": ((replicated, "_norm_of", _counted_twice), r"norm of all gradients: norm: 4\.1e-01", ""),
}
OF_LAYERS = {
    "stale scale": (
        (pretrained, "load_weights", partial(_with_stale_scale, UP)),
        f"loaded weights: 1 tensors differ, {UP} first",
        "layers.0.mlp.down_proj",
    ),
    "norm counted twice": OF_EXPERTS["norm counted twice"],
}


KINDS = {  # a configuration, its faults, and those of each commit, if any
    "cp_size": (
        transformers.Gemma3TextConfig(),
        FAULTS,
        ["dropped mask", "first micro-batch dropped"],
    ),
    "ep_size": (transformers.Qwen3MoeConfig(), OF_EXPERTS, ["swapped expert", "stale scale", "norm counted twice"]),
    "tp_size": (transformers.LlamaConfig(), OF_LAYERS, []),
}


def _faulty(folder, kind, names):
    faults = {name: partial(_seen, folder, KINDS[kind][1][name][0]) for name in names}
    return run_cases({"none": partial(_seen, folder), **faults})


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *((kind, names) for kind, (*_, names) in KINDS.items() if names),
        *(pytest.param(kind, list(faults), marks=pytest.mark.nightly) for kind, (_, faults, _) in KINDS.items()),
    ],
)
def test_each_kind_of_fault_is_found(tmp_path, kind, names):
    config, faults, _ = KINDS[kind]
    _case(tmp_path, config, ParallelDims(**{kind: 2}))
    ranks = run_ranks(_faulty, 2, tmp_path, kind, names)
    right = _proof([rank["none"] for rank in ranks])
    assert right.is_verified and not right.first_module, right
    for name in names:
        _, said, module = faults[name]
        proof = _proof([rank[name] for rank in ranks])
        assert not proof.is_verified, name
        assert any(re.match(f"fp32 {said}", problem) for problem in proof.problems), (name, proof.problems)
        assert module in proof.first_module, (name, proof.first_module)
        assert "not verified" in str(proof) and "not compared: rows of more than" in str(proof)


# ---- faults of what goes on: states, copies of heads, optimizers, the base model alone ----


def _lost(*args, **kwargs):
    """Nothing is brought back."""


def _of_copies(model):
    optimizer, head = _OPTIMIZER_OF(model), dict(model.named_parameters())[HEAD]
    (group,) = optimizer.param_groups
    group["params"] = [torch.nn.Parameter(each.detach().clone()) if each is head else each for each in group["params"]]
    return optimizer


def _changing_the_head(model, batch):
    found = _BASE_OUTPUTS(model, batch)
    Held.of(dict(model.named_parameters())[HEAD].detach()).memory.mul_(0.5)
    return found


def _another_base(model, batch):
    return {name: value * 1.01 for name, value in _BASE_OUTPUTS(model, batch).items()}


def _no_base(model, batch):
    raise RuntimeError("a single root module")


def _original_head(self, *args, **kwargs):
    return self.original_module(*args, **kwargs)


def _frozen_copy(self, *args, **kwargs):
    self.modules_to_save.requires_grad_(False)
    return _RUN_COPY(self, *args, **kwargs)


HEAD = "lm_head.weight"
_OPTIMIZER_OF, _BASE_OUTPUTS, _RUN_COPY = compare.optimizer_of, compare.base_outputs, ModulesToSaveWrapper.forward
OF_WHAT_GOES_ON = {
    "moments lost": ((accelerator, "load_optimizer", _lost), "resumed moments and step counts: other names"),
    "weights lost": ((accelerator, "load_models", _lost), "resumed weights: "),
    "schedule lost": ((AcceleratedScheduler, "load_state_dict", _lost), "resumed schedule: 3 tensors differ"),
    "torch's random state lost": ((torch, "set_rng_state", _lost), "resumed random states: 1 tensors differ, torch"),
    "Python's random state lost": ((random, "setstate", _lost), "resumed random states: 1 tensors differ, random"),
    "NumPy's random state lost": ((np.random, "set_state", _lost), "resumed random states: 1 tensors differ, numpy"),
    "position lost": ((accelerator, "restore_positions", _lost), "resumed order of rows: 1 tensors differ"),
    "an optimizer of copies": ((compare, "optimizer_of", _of_copies), f"one step of AdamW: {HEAD}"),
    "head changed": ((compare, "base_outputs", _changing_the_head), f"loaded weights: 1 tensors differ, {HEAD} first"),
    "another base": ((compare, "base_outputs", _another_base), r"base model alone: \.last_hidden_state: 1\.0e-02"),
    "a base that fails": ((compare, "base_outputs", _no_base), "base model alone: a single root module"),
}
OF_A_COPY = {
    "the original runs": ((ModulesToSaveWrapper, "forward", _original_head), "outputs in evaluation: "),
    "no gradient": ((ModulesToSaveWrapper, "forward", _frozen_copy), r"gradients: \S*lm_head\.modules_to_save"),
}


def _going_on(folder, has_adapter):
    faults = (OF_A_COPY if has_adapter else OF_WHAT_GOES_ON).items()
    cases = {name: partial(_seen, folder, fault) for name, (fault, _) in faults}
    return run_cases({"none": partial(_seen, folder), **cases})


@pytest.mark.parametrize("has_adapter", [False, True], ids=["all weights", "LoRA and a copy of the head"])
def test_what_does_not_go_on_is_found(tmp_path, has_adapter):
    _case(tmp_path, transformers.LlamaConfig(), ParallelDims(dp_shard_size=2), has_adapter=has_adapter)
    ranks = run_ranks(_going_on, 2, tmp_path, has_adapter)
    assert _proof([rank["none"] for rank in ranks]).problems == []
    for name, (_, said) in (OF_A_COPY if has_adapter else OF_WHAT_GOES_ON).items():
        proof = _proof([rank[name] for rank in ranks])
        assert any(re.match(f"fp32 {said}", problem) for problem in proof.problems), (name, proof.problems)


def _reduced_in_bf16(folder):
    def policy(param_dtype, **_):
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=param_dtype)

    faulty = partial(_seen, folder, (compare, "MixedPrecisionPolicy", policy))
    return run_cases({"none": partial(_seen, folder), "in bf16": faulty})


def test_a_reduction_in_bf16_is_found(tmp_path):
    _case(tmp_path, transformers.LlamaConfig(), ParallelDims(dp_shard_size=2), PRECISIONS)
    ranks = run_ranks(_reduced_in_bf16, 2, tmp_path)
    assert _proof([rank["none"] for rank in ranks]).is_verified
    assert _proof([rank["in bf16"] for rank in ranks]).problems == ["bf16 gradients: reduced in bf16, not in fp32"]


# ---- the command ----


LORA_OF_TWO = ["2", "--num-processes", "2", "--activation-checkpointing"]


def _run(capfd, *words):
    status = main(["verify", *map(str, words)])
    return status, capfd.readouterr()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "tie_word_embeddings": True}, ["--fsdp-version", "1", "--num-processes", "2"]),
        *(
            pytest.param({"model_type": kind}, ["--lora", option, *LORA_OF_TWO], marks=pytest.mark.nightly)
            for kind, option in (("deepseek_v3", "--cp-size"), ("llama", "--tp-size"), ("qwen3_moe", "--ep-size"))
        ),
        pytest.param({"model_type": "bert"}, ["--dp-replicate-size", "2"], marks=pytest.mark.nightly),
    ],
    ids=["FSDP1", "LoRA, cp 2", "LoRA, tp 2", "LoRA, ep 2", "HSDP"],
)
def test_a_layout_is_verified_by_the_command(tmp_path, capfd, config, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, said = _run(capfd, tmp_path, "--json", *words)
    proof = json.loads(said.out)
    assert status == 0 and proof["is_verified"], said
    norm = set() if "--fsdp-version" in words else {"norm"}
    checks = {"load", "outputs", "loss", "gradients", "accumulated", "step", "save"}
    resumed = {"weights", "moments", "schedule", "random", "rows", "continued"} if norm else set()
    base = {"base"} if norm else set()
    assert {row["check"] for row in proof["checks"]} == checks | norm | resumed | base
    assert {row["precision"] for row in proof["checks"]} == {"fp32", "bf16"}


SCRIPT = """
from transformers import LlamaConfig
model = LlamaConfig()
words = [list(range(7 * i, 7 * i + 9 + i)) for i in range(8)]
train_dataset = [{"input_ids": each, "labels": each} for each in words]
def data_collator(rows):
    import torch
    longest = max(len(row["input_ids"]) for row in rows)
    pad = lambda values, by: values + [by] * (longest - len(values))
    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([pad(row["labels"], -100) for row in rows]),
    }
if __name__ == "__main__":
    raise RuntimeError("a proof does not train")
"""


def test_a_script_gives_model_rows_and_collator(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    status, said = _run(capfd, script, "--cp-size", "2", "--num-processes", "2", "--json")
    proof = json.loads(said.out)
    assert status == 0 and proof["is_verified"] and proof["model"]["inputs"] == "input_ids attention_mask labels"
    assert {row["rows"] for row in proof["checks"]} == {"rows"}, "the user's rows alone"
    script.write_text("name = 'x'\n")
    assert _run(capfd, script)[0] == 1
    script.write_text("raise ValueError('no data')\n")
    status, said = _run(capfd, script)
    assert status == 1 and "stopped with ValueError: no data" in said.err


@pytest.mark.parametrize(
    ("config", "words", "error"),
    [
        ({"model_type": "bert"}, ["--cp-size", "2"], "BertForMaskedLM cannot be trained with cp_size 2: its loss"),
        ({"model_type": "llama"}, ["--cp-size", "2", "--num-processes", "3"], "does not make the 3 processes"),
        ({"model_type": "llama"}, ["--fsdp-version", "1", "--lora"], "leave other sizes, --lora and"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(tmp_path, capfd, config, words, error):
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, said = _run(capfd, tmp_path, *words)
    assert status == 1 and error in said.err and said.err.count("\n") == 1


@pytest.mark.nightly
def test_a_launch_file_gives_the_layout(tmp_path, capfd):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    machines = ["--num-processes", "64", "--gpu", "h100-80gb"]
    assert main(["init", *machines, "--cp-size", "8", "--output", f"{tmp_path}/f.yaml"]) == 0
    status, said = _run(capfd, tmp_path, "--config-file", tmp_path / "f.yaml")
    assert status == 0 and "dp_shard_size 2 x cp_size 2: 4 CPU ranks" in said.out and said.out.endswith("\nverified\n")


def test_equal_values_of_another_dtype_differ():
    of_dtypes = [{"a": torch.ones(2, dtype=dtype)} for dtype in (torch.bfloat16, torch.float32)]
    assert compare.unequal(*of_dtypes) == "1 tensors differ, a first" and not compare.unequal(*of_dtypes[:1] * 2)


def test_ranks_that_fail_make_no_proof():
    proof = _proof([{"error": "rank 0 failed: x"}])
    assert isinstance(proof, Proof) and not proof.is_verified and "rank 0 failed: x" in str(proof)
    assert not _proof([]).is_verified, "nothing was compared"
