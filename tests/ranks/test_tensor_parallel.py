"""transformers' own tensor parallelism below our shards, by hand: apply its plan to the model on meta, then shard and
load.

Through Accelerate's ParallelismConfig it is refused (test_integrations): parameters that tensor parallelism leaves
alone are on another mesh than the others then, and neither torch's gradient clipping nor its foreach optimizers take
both in one list.
"""

import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_fsdp_tools import build_meta_model, load_weights, make_wrap_plan, save_pretrained, shard_model
from hf_fsdp_tools.distributed.mesh import local_device
from tests._checkpoints import make_checkpoint
from tests._dist import run_ranks

tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel", reason="transformers 5.20 has it")


def _tensor_parallel(folder: Path, out: Path) -> None:
    from transformers.distributed import DistributedConfig

    warnings.simplefilter("ignore")  # FSDP2 warns of the views that DTensor hands out
    device = local_device()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = build_meta_model(folder, dtype=torch.float32)
    tp_plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2, fsdp_size=2))
    tensor_parallel.apply_tensor_parallelism(model, mesh["tp"], tp_plan)
    plan = make_wrap_plan(model)
    shard_model(model, plan, mesh=mesh["dp_shard"])
    report = load_weights(model, folder)
    assert not report.missing_keys and not report.unexpected_keys
    query = model.model.layers[0].self_attn.q_proj.weight
    assert query.device_mesh.shape == (2, 2) and model.model.norm.weight.device_mesh.shape == (2,)
    plain = AutoModelForCausalLM.from_pretrained(folder).to(device).train()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), plain.get_parameter(name)), name
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (model, plain)]
    ids = torch.randint(3, 9, (2, 12), generator=torch.Generator().manual_seed(0))
    rank = mesh.get_local_rank("dp_shard")  # ranks of one tensor parallel group see the same rows
    for _ in range(3):
        mine = ids[rank : rank + 1].to(device)
        model.train()(input_ids=mine, labels=mine).loss.backward()
        plain(input_ids=ids.to(device), labels=ids.to(device)).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name), rtol=1e-4, atol=1e-5, msg=name)
    save_pretrained(model, out)
    for name, parameter in AutoModelForCausalLM.from_pretrained(out).named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name).cpu(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.skipif(not hasattr(PreTrainedModel, "_resolve_parallel_plans"), reason="this transformers has other names")
def test_tensor_parallelism_applied_by_hand_loads_trains_and_saves_as_one_process(tmp_path):
    run_ranks(_tensor_parallel, 4, make_checkpoint("llama", tmp_path / "model"), tmp_path / "out")
