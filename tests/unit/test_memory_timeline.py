"""One step of a real training is recorded: in a loop, and as a callback of the Trainer."""

import json

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_fsdp_tools import MemoryTimeline, make_wrap_plan, shard_model
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.memory import estimate_memory

CONFIG = LlamaConfig(
    vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, use_cache=False
)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_step_of_a_loop_with_fsdp_is_recorded_by_unit(alone, tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    shard_model(model, make_wrap_plan(model))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(500, (2, 32))

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with MemoryTimeline(model, optimizer) as recorded:
        step()
    line, schedule = recorded.timeline, recorded.schedule
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    begin, end, peak = line.allocated[0], line.allocated[-1], line.peak_bytes
    assert 3 * parameters <= begin < 3.01 * parameters, "parameters and two states of Adam"
    assert abs(end - begin) < 0.02 * parameters, "what the step took it gave back"
    assert peak > begin + parameters, "gradients and activations come on top"
    assert list(dict.fromkeys(line.phases)) == ["forward", "loss", "backward", "clip", "optimizer"]
    blocks = [f"model.layers.{i}" for i in range(3)]
    by_phase = {phase: [u for p, u in zip(line.phases, line.units, strict=True) if p == phase] for phase in line.phases}
    for phase, order in (("forward", blocks), ("backward", blocks[::-1])):
        assert [unit for unit in dict.fromkeys(by_phase[phase]) if unit in blocks] == order
    assert schedule.origin == line.origin == "measured" and schedule.seconds > 0
    recorded.predicted = estimate_memory(CONFIG, batch_size=2, seq_len=32, precision="fp32", loss="full")
    assert recorded.predicted.timeline.peak_bytes == pytest.approx(peak, rel=0.05)
    recorded.save(tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text()
    assert all(text in page for text in ("peak memory, measured", "peak memory, predicted", "model.layers.{0..2}"))


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 16)
        return {"input_ids": tokens, "labels": tokens}


def train(folder, *callbacks):
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    Trainer(LlamaForCausalLM(CONFIG), args, train_dataset=Lines(), callbacks=list(callbacks)).train()


def test_the_trainer_records_the_chosen_step_and_says_so_if_none_came(tmp_path):
    recorded, late = MemoryTimeline(step=2, path=tmp_path / "step.json"), MemoryTimeline(step=9)
    with pytest.warns(UserWarning, match="training ended after step 3, before step 9"):
        train(tmp_path, recorded, late)
    assert late.timeline is None
    written = json.loads((tmp_path / "step.json").read_text())
    assert written == {name: json.loads(getattr(recorded, name).to_json()) for name in ("timeline", "schedule")}
    parameters = sum(parameter.numel() * 4 for parameter in LlamaForCausalLM(CONFIG).parameters())
    assert recorded.timeline.allocated[0] >= 3 * parameters, "the optimizer's state counts"
    assert list(dict.fromkeys(recorded.timeline.phases))[-1] == "optimizer" and "backward" in recorded.timeline.phases


def test_what_cannot_be_recorded_is_said(tmp_path):
    with pytest.raises(ConfigError, match="step is 0; the first step of a training is 1"):
        MemoryTimeline(step=0)
    with pytest.raises(ConfigError, match="No step was recorded"):
        MemoryTimeline().save(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"step\.txt cannot be written: name it \.json, \.html"):
        MemoryTimeline(path=tmp_path / "step.txt")
    with torch.profiler.profile(), pytest.raises(ConfigError, match="Another profiler is running"), MemoryTimeline():
        pass
    with pytest.raises(KeyError), MemoryTimeline() as recorded:
        raise KeyError("of the step")
    assert recorded.timeline is None
    with pytest.raises(ConfigError, match="No memory was allocated"), MemoryTimeline():
        pass
    with MemoryTimeline() as recorded:  # the profiler was stopped
        torch.ones(10_000).sum()
    assert recorded.timeline.peak_bytes >= 40_000
