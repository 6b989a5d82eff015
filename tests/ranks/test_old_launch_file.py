"""The file that `accelerate config` wrote for years, with the real `accelerate launch`: it trains under FSDP2."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests._dist import LIMIT_S

OLD = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
gpu_ids: ''
machine_rank: 0
main_process_port: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""

SCRIPT = """
import os, sys
import torch
from torch.distributed.fsdp import FSDPModule
from hf_fsdp_tools import from_pretrained, make_accelerator
accelerator = make_accelerator()
model = from_pretrained(sys.argv[1], accelerator=accelerator)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
accelerator.backward(loss)
optimizer.step()
plugin = accelerator.state.fsdp_plugin
units = isinstance(model.model.layers[0], FSDPModule)
found = f"FOUND {plugin.fsdp_version} {plugin.reshard_after_forward} {accelerator.num_processes} {units}"
os.write(1, f"{found}\\n".encode())
accelerator.wait_for_everyone()
os._exit(0)
"""


def test_a_file_of_old_is_read_as_fsdp2_and_one_rank_says_how(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-m", "accelerate.commands.launch", "--config_file", "old.yaml", "train.py", str(folders["llama"])]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall("FOUND.*", done.stdout) == ["FOUND 2 True 2 True"] * 2
    (line,) = re.findall("UserWarning: (The launch config has no fsdp_version.*)", done.stderr)
    assert "FULL_SHARD means reshard_after_forward=True; left out: forward_prefetch=True." in line
