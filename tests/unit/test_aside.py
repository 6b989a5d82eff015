"""The estimate of a recipe is made aside, in a process that sees no GPU, and said when it is known."""

import time

import pytest

pytest.importorskip("trl")

from hf_fsdp_tools import TrainingSetup, estimate_memory
from hf_fsdp_tools.scripting.aside import Aside
from tests._checkpoints import make_checkpoint


def heard(capsys, *words, less: str = "") -> tuple[str, Aside]:
    aside, said = Aside(), ""
    aside.begin(*words, {}, less=less, cure="search")
    for _ in range(1200):
        if said := capsys.readouterr().out:
            return said, aside
        time.sleep(0.1)
    raise TimeoutError


def test_what_does_not_fit_is_said_with_how_to_go_on(tmp_path, capsys):
    make_checkpoint("llama", tmp_path)
    setup = TrainingSetup(max_length=32, per_device_train_batch_size=2)
    said, aside = heard(capsys, str(tmp_path), setup)
    memory = estimate_memory(tmp_path, setup)
    assert said.startswith("estimated peak ") and said.endswith(" of 84.9 GB\n")
    assert aside.values["peak_gb"] == memory.peak_allocated / 1e9 and aside.values["tokens_per_second_per_gpu"] > 0
    large = TrainingSetup(per_device_train_batch_size=2**20, max_length=32)
    said, aside = heard(capsys, str(tmp_path), large, less="--kernel")
    assert said.endswith(" of 84.9 GB, less with --kernel, which does not fit: search\n")
    said, aside = heard(capsys, str(tmp_path / "absent"), setup)
    assert said.startswith("no estimate of the peak: ") and aside.values is None
