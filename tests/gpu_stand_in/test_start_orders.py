"""Who starts the process group, and which variables the launcher sets, must not decide what works: a table of orders.

Each row starts its ranks as processes of their own on a stand-in for the CUDA runtime, where torch is the real build
for CUDA, and NCCL's operations are counted.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_fsdp_tools
from tests._dist import LIMIT_S, free_port


def _is_there() -> bool:
    if importlib.util.find_spec("fakegpu") is None:
        return False
    import fakegpu

    return bool(fakegpu.is_fake())


pytestmark = pytest.mark.skipif(
    not _is_there(), reason="needs a stand-in for the CUDA runtime, which is not set up here"
)

SCRIPT = """
import json, os, sys, warnings
import fakegpu, torch, torch.distributed as dist
from transformers import Trainer, TrainingArguments
from hf_fsdp_tools import FSDPTrainerMixin, from_pretrained, make_accelerator
from hf_fsdp_tools.streaming.exchange import gather_to_first
from hf_fsdp_tools.distributed.cpu_backend import timeout_of
from tests._training import make_rows

first, folder, out = sys.argv[1:]
said = []
warnings.showwarning = lambda message, *rest: said.append(str(message))


class OurTrainer(FSDPTrainerMixin, Trainer):
    pass


def arguments():
    return TrainingArguments(output_dir=out, per_device_train_batch_size=2, max_steps=2, save_steps=1, report_to=[],
                             dataloader_pin_memory=False, disable_tqdm=True, learning_rate=1e-2, logging_steps=1)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if first == "a group bound to a device":
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
if first == "accelerator":
    make_accelerator()
if first == "model":
    model = from_pretrained(folder)
    args = arguments()
else:
    args = arguments()
    model = from_pretrained(folder, accelerator=make_accelerator())
trainer = OurTrainer(model=model, args=args, train_dataset=make_rows(8))
found = {"n_gpu": args.n_gpu, "current": torch.cuda.current_device(), "devices": [str(args.device),
         str(trainer.accelerator.device)], "wrapped": type(trainer._wrap_model(model)).__name__,
         "timeout_s": timeout_of().total_seconds(), "rows": args.train_batch_size,
         "backends": sorted(str(device) for device in dist.group.WORLD._device_types), "alone": said}

fakegpu.reset()
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, dist.get_rank())
count = torch.ones(1)
dist.all_reduce(count)
whole = gather_to_first(next(model.parameters()), staging_bytes=1000)
trainer.accelerator.wait_for_everyone()
with trainer.accelerator.main_process_first():
    pass
found["counted"], found["by NCCL"] = count.item(), {name: n for name, n in fakegpu.stats().items() if "nccl" in name}
found["gathered on"] = None if whole is None else str(whole.device)

trainer.train()
trainer.accelerator.save_state(out + "/state")
trainer.accelerator.load_state(out + "/state")
trainer.save_model(out + "/saved")
again = OurTrainer(model=from_pretrained(folder), args=arguments(), train_dataset=make_rows(8))
again.train(resume_from_checkpoint=out + "/checkpoint-1")
found["losses"], found["resumed"] = losses(trainer), losses(again)
again.accelerator.wait_for_everyone()
print("FOUND " + json.dumps(found), flush=True)
os._exit(0)
"""


def _start(first: str, ranks: list[dict[str, str]], folder: Path, out: Path) -> list[dict[str, Any]]:
    """What each rank found; the ranks have the given variables, and nothing of another launcher's."""
    launchers = (
        "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "ACCELERATE_", "FSDP_", "CUDA_VIS",
    )  # fmt: skip
    variables = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    paths = [str(Path(hf_fsdp_tools.__file__).parents[1]), variables.get("PYTHONPATH", "")]
    variables |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"FAKE_GPUS": "2", "FAKEGPU_KERNELS": "cpu"}
    if len(ranks) > 1:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
        variables["WORLD_SIZE"] = str(len(ranks))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, first, str(folder), str(out)],
            env=variables | rank, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in ranks
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [[line for line in output.splitlines() if line.startswith("FOUND ")] for output in outputs]
    assert all(found), "\n".join(output[-3000:] for output in outputs)
    return [json.loads(lines[0].removeprefix("FOUND ")) for lines in found]


TORCHRUN = [{"RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": "2"} for r in range(2)]
SRUN = [{"RANK": str(r), "SLURM_LOCALID": str(r), "SLURM_STEP_TASKS_PER_NODE": "2"} for r in range(2)]


def _one_visible(ranks: list[dict[str, str]]) -> list[dict[str, str]]:
    return [rank | {"CUDA_VISIBLE_DEVICES": str(number)} for number, rank in enumerate(ranks)]


@pytest.mark.parametrize(
    ("first", "ranks", "current", "timeout_s"),
    [
        pytest.param("arguments", TORCHRUN, [0, 1], 1800, id="torchrun, TrainingArguments first"),
        pytest.param("accelerator", TORCHRUN, [0, 1], 600, id="torchrun, accelerator first"),
        pytest.param("model", TORCHRUN, [0, 1], 600, id="torchrun, model first"),
        pytest.param("a group bound to a device", TORCHRUN, [0, 1], 600, id="torchrun, a bound group first"),
        pytest.param("arguments", _one_visible(TORCHRUN), [0, 0], 1800, id="torchrun, one GPU visible to each"),
        pytest.param("arguments", _one_visible(SRUN), [0, 0], 600, id="srun, one GPU visible to each"),
        pytest.param("arguments", SRUN, [0, 1], 600, id="srun, all GPUs visible"),
        pytest.param("arguments", [{}], [0], 600, id="alone, TrainingArguments first"),
        pytest.param("model", [{}], [0], 600, id="alone, model first"),
    ],
)
def test_start_orders(first: str, ranks: Any, current: Any, timeout_s: int, tmp_path: Path, folders: Any) -> None:
    found = _start(first, ranks, folders["llama"], tmp_path / "out")
    assert [one["current"] for one in found] == current
    for one in found:
        device = f"cuda:{one['current']}"
        assert one["backends"] == ["cpu", "cuda"]
        assert (one["n_gpu"], one["rows"], one["devices"]) == (1, 2, [device, device])
        assert one["wrapped"] == "LlamaForCausalLM", "DataParallel would take all GPUs"
        assert one["timeout_s"] == timeout_s, "a script's own group keeps its time limit"
        assert (one["counted"], one["by NCCL"]) == (len(ranks), {}), "objects and CPU tensors go over gloo"
        assert any("1 of 2 devices is used" in text for text in one["alone"]) == (len(ranks) == 1)
        assert len(one["losses"]) == 2 and one["resumed"][-1] == one["losses"][-1]
    assert [one["gathered on"] for one in found] == ["cpu", None][: len(ranks)]
