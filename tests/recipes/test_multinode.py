"""Two machines of one process each, started by `accelerate launch --machine_rank`: here two launchers on loopback."""

import multiprocessing
import os
import re
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from accelerate.commands import launch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests._checkpoints import make_checkpoint
from tests._dist import LIMIT_S, free_port
from tests._training import make_rows, train

STEPS = 2
# Sharded and plain runs add the same numbers in another order; over two AdamW steps that stays below 1e-5 (measured).
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader
from hf_fsdp_tools import CheckpointError, from_pretrained, make_accelerator, save_pretrained

source, shared, rows = sys.argv[1:]
accelerator = make_accelerator(cpu=True)
print("WHERE", os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], dist.get_world_size(),
      os.environ["MASTER_ADDR"])
model = from_pretrained(source, accelerator=accelerator)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model.train(), optimizer, DataLoader(torch.load(rows), batch_size=2))
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print("LOSS", accelerator.reduce(loss.detach(), "mean").item())
save_pretrained(model, shared)
try:  # each machine runs in a folder of its own, so this path is on no file system that both see
    save_pretrained(model, "unshared")
except CheckpointError as error:
    print("SAVE", " ".join(str(error).split()))
try:
    from_pretrained("only_here", accelerator=accelerator)
except CheckpointError as error:
    print("LOAD", " ".join(str(error).split()))
accelerator.wait_for_everyone()
sys.stdout.flush()
os._exit(0)
"""


def machine(rank: int, port: int, folder: Path, *arguments: str) -> BaseProcess:
    """One machine: its own launcher, its own working directory, the address of machine 0 as the network gives it."""
    folder.mkdir()
    config = folder / "config.yaml"  # as `accelerate config` writes it on each machine, but for what the options say
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\ngpu_ids: ''\nmixed_precision: 'no'\n"
        "fsdp_config: {fsdp_version: 2, fsdp_cpu_ram_efficient_loading: true, fsdp_state_dict_type: FULL_STATE_DICT}\n"
    )
    command = ["accelerate-launch", "--config_file", str(config)]
    command += ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank)]
    command += ["--main_process_ip", "127.0.0.2", "--main_process_port", str(port)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    words = [*command, *arguments]
    made = multiprocessing.get_context("forkserver").Process(target=launcher, args=(folder, words, environment))
    made.start()
    return made


def launcher(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """The life of one launcher, forked from the server of ranks, which has imported Accelerate; its scripts are not."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = words
    launch.main()


def test_two_machines_train_as_one_process_and_say_alike_what_they_do_not_share(tmp_path):
    source = make_checkpoint("tied", tmp_path / "model")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = free_port("127.0.0.2")
    torch.save(make_rows(8), tmp_path / "rows.pt")  # who imports tests imports half of what is installed
    words = [str(script), str(source), str(tmp_path / "saved"), str(tmp_path / "rows.pt")]
    folders = [tmp_path / f"machine{rank}" for rank in range(2)]
    machines = [machine(rank, port, folder, *words) for rank, folder in enumerate(folders)]
    make_checkpoint("tied", tmp_path / "machine0" / "only_here")
    for each in machines:
        each.join(LIMIT_S / 2)
        each.kill()
    printed, errors = ([(folder / name).read_text() for folder in folders] for name in ("stdout", "stderr"))
    assert [each.exitcode for each in machines] == [0, 0], "\n".join(error[-3000:] for error in errors)
    plain = AutoModelForCausalLM.from_pretrained(source).train()
    optimizer, rows = torch.optim.AdamW(plain.parameters(), lr=1e-2), DataLoader(make_rows(STEPS * 4), batch_size=4)
    expected = torch.tensor(train(plain, optimizer, rows, clip=0.5))
    for rank, out in enumerate(printed):
        assert f"WHERE {rank} 0 1 2 127.0.0.2" in out, "one process on each of two machines"
        losses = torch.tensor([float(loss) for loss in re.findall(r"LOSS (\S+)", out)])
        torch.testing.assert_close(losses, expected, **TOLERANCE)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.config.model_type == "qwen3"
    for kind, cure in (("SAVE", "Save to a file system that all ranks share"), ("LOAD", "only_here")):
        messages = [re.findall(rf"{kind} (.*)", out) for out in printed]
        assert messages[0] == messages[1] and len(messages[0]) == 1, f"both stop, with the same words: {messages}"
        assert cure in messages[0][0], messages[0][0]
