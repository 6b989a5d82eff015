"""What only a GPU can break: pinned copies on side streams, NCCL beside gloo, loss scaling, compilation.

Some cases run on the CPU, and all on a GPU where there is one, sharded where GPUs, or NCCL that shares one, let them.
All ranks train on the same rows, so the numbers do not depend on how many there are.
"""

import copy
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    FSDPPlugin,
    WrapPolicy,
    diagnose,
    from_pretrained,
    resize_token_embeddings,
    save_pretrained,
)
from hf_fsdp_tools.steps import load_weights, make_wrap_plan, shard_model
from tests._checkpoints import assert_same_model, bits, full, make_quantized
from tests._dist import needs_gpus, run_cases, run_ranks
from tests._rounding import assert_within
from tests._training import ShardedTrainer, apart, arguments, by_hand, full_parameters, logged, new_accelerator, train
from tests._transfers import read_transfers
from tests.api import (
    Held,
    ShardedScaler,
    Transfer,
    allocate,
    initialize_missing,
    local_device,
    weights_4bit,
    write_transfers,
)

STEPS = 3
IDS = torch.randint(3, 131, (4, 12), generator=torch.Generator().manual_seed(1))


def _is_gpu() -> bool:
    return local_device().type == "cuda"


def _batch() -> dict[str, torch.Tensor]:
    ids = IDS.to(local_device())
    return {"input_ids": ids, "labels": ids}


def _steps(model: nn.Module, count: int = STEPS) -> list[float]:
    """A plain training loop."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return train(model.train(), optimizer, [_batch()] * count, clip=0.5)


def _expected(folder: Path) -> list[float]:
    """The same steps without any of this, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    return train(model, optimizer, [{"input_ids": IDS, "labels": IDS}] * STEPS, clip=0.5)


def _close(found: list[float], expected: list[float], rtol: float = 1e-4) -> None:
    # fp32: a GPU adds in another order (TF32 is off by default), and AdamW's steps carry that on
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-5)


def _loading(folder: Path, out: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    here = local_device().type
    before = torch.random.get_rng_state(), torch.cuda.get_rng_state() if _is_gpu() else None
    model = from_pretrained(folder)
    assert_same_model(model, plain)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {here}
    assert torch.equal(torch.random.get_rng_state(), before[0]), "loading draws no random number of the user's"
    assert before[1] is None or torch.equal(torch.cuda.get_rng_state(), before[1])
    assert not [f for f in diagnose(model).findings if f.severity == "error"]
    _close(_steps(model), _expected(folder))
    save_pretrained(model, out / "saved")
    assert_same_model(model, AutoModelForCausalLM.from_pretrained(out / "saved"))
    load_weights(model, folder)  # over weights that are there
    assert_same_model(model, plain)
    others = set(range(torch.cuda.device_count())) - {torch.cuda.current_device()} if _is_gpu() else set()
    assert not any(torch._C._cuda_hasPrimaryContext(other) for other in others), "half a gigabyte of another rank's GPU"


def _held(folder: Path) -> None:
    """Ten loads hold no more than one, pinned or beside the shards: one segment of each size, 2 and 20 MiB."""
    for dtype in (torch.float32, torch.bfloat16):
        seen = []
        for _ in range(10):
            model = from_pretrained(folder, dtype=dtype, load_kwargs={"staging_bytes": 2**20})
            torch.cuda.synchronize()
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            stats = torch.cuda.host_memory_stats()
            seen.append((stats["active_bytes.current"], stats["allocated_bytes.current"], unused))
            del model
        in_use, kept, unused = zip(*seen, strict=True)
        assert max(unused) <= 22 * 2**20, seen
        if hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.11 gives no pinned memory back
            assert max(kept) <= 2**20 and not any(in_use), seen


def _packed(folder: Path) -> None:
    given = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16}
    given["llm_int8_skip_modules"] = ["gate_proj", "up_proj", "down_proj", "lm_head"]  # of no whole blocks
    options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **given), "dtype": torch.bfloat16}
    model = from_pretrained(folder, **options)
    plain = AutoModelForCausalLM.from_pretrained(folder, device_map={"": local_device()}, **options)
    expected = dict(plain.named_parameters())
    for fqn in weights_4bit(model):
        packed = expected.pop(fqn)
        expected |= {f"{fqn}_packed": packed, f"{fqn}_scale": packed.quant_state.absmax}
    for name, parameter in model.named_parameters():
        assert torch.equal(bits(full(parameter)), bits(expected[name]).cpu()), name


def _staged(folder: Path) -> None:
    """More bytes than all buffers hold, every second column, cast on the way there and back; and many small runs."""
    tensor = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rank = dist.get_rank()
    file, copy = folder / f"stored-{rank}", folder / f"copy-{rank}"
    file.write_bytes(tensor.view(torch.uint8).numpy().tobytes())
    copy.write_bytes(bytes(tensor.nbytes))
    every_second = {"file": file, "start": 0, "dtype": torch.bfloat16, "strides": (512, 2)}
    for dtype in (torch.bfloat16, torch.float32):
        memory = torch.zeros(4096, 256, dtype=dtype, device=local_device())
        stats = read_transfers([Transfer(**every_second, memory=memory)], staging_bytes=2**20)
        assert stats.staging_bytes <= 2**20
        assert torch.equal(memory.cpu(), tensor[:, ::2].to(dtype))
        memory.mul_(2)  # queued; writing must come after it
        whole = Transfer(file=copy, start=0, dtype=torch.bfloat16, strides=(256, 1), memory=memory)
        write_transfers([whole], staging_bytes=2**20)
        written = torch.frombuffer(bytearray(copy.read_bytes()), dtype=torch.bfloat16)[: 4096 * 256]
        assert torch.equal(written.view(4096, 256), tensor[:, ::2] * 2)
    small = [torch.zeros(512, dtype=torch.bfloat16, device=local_device()) for _ in range(4096)]
    run = partial(Transfer, file=file, dtype=torch.bfloat16, strides=(1,))
    rows = [run(start=1024 * i, memory=row) for i, row in enumerate(small)]
    for some in (rows, rows[1::2], rows[:3]):
        read_transfers(some, staging_bytes=2**20)
    assert torch.equal(torch.stack(small).cpu(), tensor)
    write_transfers([replace(row, file=copy) for row in rows], staging_bytes=2**20)
    assert copy.read_bytes() == file.read_bytes()
    with open(file, "r+b") as stream:
        stream.truncate(tensor.nbytes // 2)
    with pytest.raises(CheckpointError, match="shrank"):  # while copies of the first half are under way
        read_transfers([Transfer(**every_second, memory=memory)], staging_bytes=2**20)


WHOLE = WrapPolicy(replicate=("model.norm.weight", "model.layers.1.input_layernorm.weight", "model.embed_tokens"))


def _mixed(folder: Path, mixed_precision: str, offload: bool, fused: bool) -> None:
    """Offloaded shards, on the CPU, stand in one group with whole parameters, on the device."""
    plugin = FSDPPlugin(policy=WHOLE if offload else None, cpu_offload=offload)
    accelerator = new_accelerator(mixed_precision=mixed_precision, fsdp_plugin=plugin)
    if mixed_precision == "fp16" and not _is_gpu():
        accelerator.scaler, accelerator.native_amp = ShardedScaler("cpu"), True  # what Accelerate has on GPUs
    model = from_pretrained(folder, accelerator=accelerator)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "master weights"
    if offload:
        places = {(hasattr(p, "placements"), p.device.type) for p in model.parameters()}
        assert places == {(True, "cpu"), (False, local_device().type)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    losses = train(model, optimizer, [_batch()] * STEPS, accelerator=accelerator, clip=0.5)
    if mixed_precision == "no":
        _close(losses, _expected(folder))
    else:
        dtype, scale = (torch.bfloat16, 1.0) if mixed_precision == "bf16" else (torch.float16, 2.0**16)
        steps = [[_batch()]] * STEPS
        assert_within(losses, lambda: by_hand(folder, steps, torch.float32, dtype, clip=0.5, scale=scale)[0])
    if mixed_precision == "fp16":
        assert accelerator.scaler is not None and not optimizer.step_was_skipped
        before = full_parameters(model)
        accelerator.backward(model(**_batch()).loss * float("inf"))
        optimizer.step()
        assert optimizer.step_was_skipped and accelerator.scaler.get_scale() == 2.0**15
        assert apart(full_parameters(model), before) == 0


def _compiled(folder: Path) -> None:
    # the code that inductor makes for CPUs takes minutes to build; on GPUs it is what users get
    model = from_pretrained(folder, compile={} if _is_gpu() else {"backend": "aot_eager"})
    _close(_steps(model), _expected(folder))


def _compiled_without_graphs(folder: Path) -> None:
    with pytest.raises(ConfigError, match="records CUDA graphs"):
        from_pretrained(folder, compile={"mode": "max-autotune"})
    model = from_pretrained(folder, compile={"mode": "max-autotune-no-cudagraphs"})
    _close(_steps(model), _expected(folder))


_losses: list[list[float]] = []
"""What the Trainer's runs on this rank gave, one after the other."""


def _train(folder: Path, out: Path, resume: bool) -> None:
    args = arguments(
        out, max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        train_sampling_strategy="sequential", dataloader_pin_memory=_is_gpu(),
    )  # fmt: skip
    model = from_pretrained(folder, accelerator=new_accelerator())
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    trainer = ShardedTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2") if resume else None)
    trainer.model.generate(IDS[:1, :3].to(local_device()), max_new_tokens=3, do_sample=False)
    trainer.save_model(str(out / "final"))
    _losses.append(logged(trainer))
    assert len(_losses[-1]) == 4 and _losses[-1][-1] < _losses[-1][0]
    assert not resume or _losses[-1] == pytest.approx(_losses[-2], rel=1e-3), "also in the steps after the checkpoint"


# ---- what lies in the memory of a GPU: nothing of an offloaded share, and no whole tensor only to be cut ----


def _share_bytes(model: nn.Module) -> int:
    return sum(Held.of(parameter).memory.nbytes for parameter in model.parameters())


def _assert_offloaded(model: nn.Module) -> None:
    """Every shard is on the CPU, in pinned memory where there is a GPU; buffers are where the computation is."""
    for name, parameter in model.named_parameters():
        shard = Held.of(parameter).memory
        assert isinstance(parameter, DTensor) and parameter.device.type == shard.device.type == "cpu", name
        assert not shard.numel() or shard.is_pinned() == _is_gpu(), name
    assert {buffer.device.type for buffer in model.buffers()} <= {local_device().type}


@contextmanager
def _nothing_on_the_gpu(share_bytes: int) -> Iterator[None]:
    """A block that takes less memory of the GPU than a tenth of the share."""
    if not _is_gpu():
        yield
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    assert torch.cuda.max_memory_allocated() - before < share_bytes / 10


def _offloaded(folder: Path, out: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with _nothing_on_the_gpu(sum(p.nbytes for p in plain.parameters()) // dist.get_world_size()):
        model = from_pretrained(folder, offload_policy=CPUOffloadPolicy())
        _assert_offloaded(model)
        save_pretrained(model, out / "offloaded")
    assert_same_model(model, AutoModelForCausalLM.from_pretrained(out / "offloaded"))
    losses = _steps(model)
    _close(losses, _expected(folder))
    _assert_offloaded(model)
    with _nothing_on_the_gpu(_share_bytes(model)):
        load_weights(model, folder)  # over weights that are there
        for assign in (False, True):
            model.load_state_dict(plain.state_dict(), assign=assign)
            _assert_offloaded(model)
        twin = copy.deepcopy(model)
    assert_same_model(twin, plain)
    _close(_steps(twin, count=1), losses[:1])
    _assert_offloaded(twin)
    resize_token_embeddings(model, 140)
    _assert_offloaded(model)


def _whole_and_offloaded(folder: Path, out: Path) -> None:
    """Parameters that FSDP cannot shard (0-d, empty) and buffers stay on the device of the computation."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.none = nn.Parameter(torch.empty(0, 8))
            self.register_buffer("kept", torch.arange(8.0))
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) * self.scale + self.kept * self.count).sum() + self.none.sum()

    torch.manual_seed(0)
    plain = Odd()
    if dist.get_rank() == 0:
        save_file(plain.state_dict(), out / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = Odd()
    shard_model(model, make_wrap_plan(model), offload_policy=CPUOffloadPolicy())
    load_weights(model, out)
    assert_same_model(model, plain)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.device.type == ("cpu" if name.startswith("inner") else local_device().type), name
    x = torch.arange(8.0)
    model(x.to(local_device())).backward()
    plain(x).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name).grad), parameter.grad)


def _cut_on_the_host(folder: Path, out: Path) -> None:
    """Values that live in no file, and a plain state dict, reach the GPU as this rank's part alone."""
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False))
    shard_model(model, make_wrap_plan(model))
    allocate(model, device=local_device())
    with _nothing_on_the_gpu(_share_bytes(model)):
        initialize_missing(model, missing_keys={name for name, _ in model.named_parameters()}, seed=1)
    plain = {name: torch.arange(float(p.numel())).view(p.shape) for name, p in model.named_parameters()}
    assert all(0 < full(p).std() < 1 for p in model.parameters())
    with _nothing_on_the_gpu(_share_bytes(model)):
        model.load_state_dict(plain)
    assert all(torch.equal(full(p), plain[name]) for name, p in model.named_parameters())
    model.load_state_dict({name: -value for name, value in plain.items()}, assign=True)
    assert {p.device.type for p in model.parameters()} == {local_device().type}
    assert all(torch.equal(full(p), -plain[name]) for name, p in model.named_parameters())


FEW = ("staging buffers", "fp16, offload True, fused False", "_whole_and_offloaded", "_offloaded")
"""Cases of each commit on the CPU, where other tests of ranks show what the others do."""

PARTS = ("loading", "precision", "compiled", "trainer", "offload")
"""Of the cases: each ends within 100 s on a GPU."""


def _all_cases(folder: Path, out: Path, parts: Sequence[str], names: Sequence[str] = ()) -> dict[str, Any]:
    precisions = [("bf16", False), ("fp16", False), ("no", True), ("bf16", True), ("fp16", True)]
    own = (_offloaded, _whole_and_offloaded, _cut_on_the_host)
    cases: dict[str, dict[str, Any]] = {
        "loading": {
            "load, train, save": partial(_loading, folder, out / "loading"),
            **({"4-bit weights": partial(_packed, folder)} if find_spec("bitsandbytes") else {}),
            "staging buffers": partial(_staged, out),
        },
        "precision": {
            f"{kind}, offload {offload}, fused {fused}": partial(_mixed, folder, kind, offload, fused)
            for kind, offload in precisions
            for fused in (False, True)
        },
        "compiled": {"compiled blocks": partial(_compiled, folder)},
        "trainer": {f"resumed {resumed}": partial(_train, folder, out / "run", resumed) for resumed in (False, True)},
        "offload": {case.__name__: partial(case, folder, out) for case in own},
    }
    if _is_gpu() and dist.get_world_size() == 1:
        cases["loading"]["memory"] = partial(_held, folder)
        cases["compiled"]["CUDA graphs"] = partial(_compiled_without_graphs, folder)
    every = {name: case for part in parts for name, case in cases[part].items()}
    return run_cases({name: every[name] for name in names or every})


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", [pytest.param(count, marks=needs_gpus(count)) for count in (1, 2, 4)])
def test_all_that_a_device_can_break(ranks: int, part: str, folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(_all_cases, ranks, folders["llama"], tmp_path, [part], device="cuda")


def test_what_a_device_can_break_on_the_cpu(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(_all_cases, 1, folders["llama"], tmp_path, PARTS, FEW, device="cpu")


def _layers(kind: str, folder: Path, layers: int) -> tuple[int, int]:
    """Bytes of the GPU's memory that a step takes above what it begins with, at most and in the end."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 512, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers}
    if dist.get_rank() == 0:
        make_quantized(kind, folder, lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads)))
    dist.barrier()
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    options = {"activation_checkpointing": True, "dtype": torch.bfloat16, "load_kwargs": {"seed": 0}}
    model = from_pretrained(folder, dequantize=False, peft_config=adapter, **options).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.arange(3, 67).view(1, 64).to(local_device())
    for _ in range(2):  # the first one makes what stays
        gc.collect()  # the model before this one
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def _depths(folder: Path) -> None:
    for kind in ("fp8 of 128 x 128", "compressed int4", "awq"):
        (few, left), (many, left_too) = (_layers(kind, folder / f"{kind} {n}", n) for n in (2, 6))
        assert left == left_too == 0, kind
        assert many - few < 2 * 768 * 256, f"{kind}: four layers more take less than one of their dequantised weights"


@pytest.mark.parametrize("ranks", [pytest.param(count, marks=needs_gpus(count)) for count in (1, 2)])
def test_a_step_on_a_base_that_stays_quantised_takes_no_memory_that_grows_with_depth(
    ranks: int, tmp_path: Path
) -> None:
    run_ranks(_depths, ranks, tmp_path, device="cuda")
