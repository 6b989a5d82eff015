"""What only a GPU can break: pinned copies on side streams, NCCL beside gloo, loss scaling, compilation.

All cases run on the CPU, and the same on a GPU where there is one: one rank is enough. With two GPUs they run sharded.
All ranks train on the same rows, so the numbers do not depend on how many there are.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    HybridFSDPPlugin,
    HybridPolicy,
    diagnose,
    from_pretrained,
    load_weights,
    save_pretrained,
)
from hf_fsdp_tools.distributed.mesh import local_device
from hf_fsdp_tools.integrations.accelerator import adopt
from hf_fsdp_tools.loading.io.files import write_transfers
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.modeling.four_bits import weights_4bit
from tests._checkpoints import assert_same_model, bits, full
from tests._dist import num_gpus, run_cases, run_ranks
from tests._training import ShardedTrainer, apart, arguments, full_parameters, logged, new_accelerator, train
from tests._transfers import read_transfers

STEPS = 3
IDS = torch.randint(3, 131, (4, 12), generator=torch.Generator().manual_seed(1))


def _needs(gpus: int) -> Any:
    return pytest.mark.skipif(num_gpus() < gpus, reason=f"needs {gpus} CUDA device(s); there are {num_gpus()}")


on_each = pytest.mark.parametrize(
    ("device", "ranks"),
    [
        pytest.param("cpu", 1, id="cpu"),
        pytest.param("cuda", 1, id="one GPU", marks=[pytest.mark.gpu, _needs(1)]),
        pytest.param("cuda", 2, id="two GPUs", marks=[pytest.mark.gpu, _needs(2)]),
    ],
)


def _is_gpu() -> bool:
    return local_device().type == "cuda"


def _batch() -> dict[str, torch.Tensor]:
    ids = IDS.to(local_device())
    return {"input_ids": ids, "labels": ids}


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, count: int = STEPS) -> list[float]:
    """A plain training loop."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return train(model.train(), optimizer, [_batch()] * count, clip=0.5)


def _expected(folder: Path, count: int = STEPS) -> list[float]:
    """The same steps without any of this, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    return train(model, optimizer, [{"input_ids": IDS, "labels": IDS}] * count, clip=0.5)


def _close(found: list[float], expected: list[float], rtol: float = 1e-4) -> None:
    # fp32: a GPU adds in another order (TF32 is off by default), and AdamW's steps carry that on
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-5)


# ---- loading ----


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
    # cast on the way, and saved again in the dtype of the files
    half = from_pretrained(folder, dtype=torch.bfloat16)
    assert_same_model(half, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    _close(_steps(model), _expected(folder))
    save_pretrained(model, out / "saved")
    assert_same_model(model, AutoModelForCausalLM.from_pretrained(out / "saved"))
    load_weights(model, folder)  # over weights that are there
    assert_same_model(model, plain)
    others = set(range(torch.cuda.device_count())) - {torch.cuda.current_device()} if _is_gpu() else set()
    assert not any(torch._C._cuda_hasPrimaryContext(other) for other in others), "half a gigabyte of another rank's GPU"


def _held(folder: Path) -> None:
    """Ten loads hold no more than one, pinned or beside the shards: one segment of each size, 2 and 20 MiB."""
    seen = []
    for _ in range(10):
        model = from_pretrained(folder, dtype=torch.float32, load_kwargs={"staging_bytes": 2**20})
        torch.cuda.synchronize()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        stats = torch.cuda.host_memory_stats()
        seen.append((stats["active_bytes.current"], stats["allocated_bytes.current"], unused))
        del model
    in_use, kept, unused = zip(*seen, strict=True)
    assert max(kept) <= 2**20 and max(unused) <= 22 * 2**20, seen
    assert not any(in_use) or not hasattr(torch.accelerator, "empty_host_cache"), seen


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


# ---- precision ----


WHOLE = HybridPolicy(replicate=("model.norm.weight", "model.layers.1.input_layernorm.weight", "model.embed_tokens"))


def _mixed(folder: Path, mixed_precision: str, offload: bool, fused: bool) -> None:
    """Offloaded shards, on the CPU, stand in one group with whole parameters, on the device."""
    plugin = HybridFSDPPlugin(policy=WHOLE if offload else None, cpu_offload=offload)
    accelerator = new_accelerator(mixed_precision=mixed_precision, fsdp_plugin=plugin)
    if mixed_precision == "fp16" and not _is_gpu():
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True  # what Accelerate has on GPUs
        adopt(accelerator, sync_each_batch=True)
    model = from_pretrained(folder, accelerator=accelerator)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "master weights"
    if offload:
        places = {(hasattr(p, "placements"), p.device.type) for p in model.parameters()}
        assert places == {(True, "cpu"), (False, local_device().type)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    losses = train(model, optimizer, [_batch()] * STEPS, accelerator=accelerator, clip=0.5)
    # bf16 keeps 8 bits of a number (4e-3), fp16 11; three steps
    _close(losses, _expected(folder), rtol=1e-4 if mixed_precision == "no" else 2e-2)
    text = model.eval().generate(IDS[:1, :3], max_new_tokens=3, do_sample=False)  # shards may be on the CPU, as the ids
    assert text.shape == (1, 6)
    model.train()
    if mixed_precision == "fp16":
        assert accelerator.scaler is not None and not optimizer.step_was_skipped
        before = full_parameters(model)
        accelerator.backward(model(**_batch()).loss * float("inf"))
        optimizer.step()
        assert optimizer.step_was_skipped and accelerator.scaler.get_scale() == 2.0**15
        assert apart(full_parameters(model), before) == 0


# ---- compiled ----


def _compiled(folder: Path) -> None:
    # the code that inductor makes for CPUs takes minutes to build; on GPUs it is what users get
    model = from_pretrained(folder, compile={} if _is_gpu() else {"backend": "aot_eager"})
    _close(_steps(model), _expected(folder))


def _compiled_without_graphs(folder: Path) -> None:
    with pytest.raises(ConfigError, match="records CUDA graphs"):
        from_pretrained(folder, compile={"mode": "max-autotune"})
    model = from_pretrained(folder, compile={"mode": "max-autotune-no-cudagraphs"})
    _close(_steps(model), _expected(folder))


# ---- Accelerate and the Trainer ----


def _resumed(folder: Path, out: Path, offload: bool) -> None:
    plugin = HybridFSDPPlugin(cpu_offload=offload)
    accelerator = new_accelerator(fsdp_plugin=plugin)

    def fresh() -> tuple[Any, Any]:
        model = from_pretrained(folder, accelerator=accelerator)
        accelerator._models.clear()
        accelerator._optimizers.clear()
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    model, optimizer = fresh()
    losses = _steps(model, optimizer)
    accelerator.save_state(str(out / "state"))
    on = _steps(model, optimizer)
    model, optimizer = fresh()
    accelerator.load_state(str(out / "state"))
    again = _steps(model, optimizer)
    if _is_gpu():  # its kernels may add in another order each time
        _close(again, on, rtol=1e-5)
    else:
        assert again == on, "the same steps, to the last bit"
    _close(losses + on, _expected(folder, 2 * STEPS), rtol=1e-3)


_losses: list[list[float]] = []
"""Of the Trainer's runs on this rank, one after the other."""


def _train(folder: Path, out: Path, plain: bool, resume: bool) -> None:
    args = arguments(
        out, max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        train_sampling_strategy="sequential", dataloader_pin_memory=_is_gpu(),
    )  # fmt: skip
    load = AutoModelForCausalLM.from_pretrained if plain else partial(from_pretrained, accelerator=new_accelerator())
    model = load(folder)
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    trainer = ShardedTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2") if resume else None)
    trainer.model.generate(IDS[:1, :3].to(local_device()), max_new_tokens=3, do_sample=False)
    trainer.save_model(str(out / "final"))
    _losses.append(logged(trainer))
    assert len(_losses[-1]) == 4 and _losses[-1][-1] < _losses[-1][0]
    assert not resume or _losses[-1] == pytest.approx(_losses[-2], rel=1e-3), "also in the steps after the checkpoint"


def _all_cases(folder: Path, out: Path) -> None:
    precisions = [("bf16", False), ("fp16", False), ("no", True), ("bf16", True), ("fp16", True)]
    in_turn = {each: (False, True) if _is_gpu() else (bool(i % 2),) for i, each in enumerate(precisions)}
    cases: dict[str, Any] = {
        "load, train, save": partial(_loading, folder, out / "loading"),
        "4-bit weights": partial(_packed, folder),
        "staging buffers": partial(_staged, out),
        **{
            f"{kind}, offload {offload}, fused {fused}": partial(_mixed, folder, kind, offload, fused)
            for (kind, offload), ways in in_turn.items()
            for fused in ways
        },
        "compiled blocks": partial(_compiled, folder),
        **{f"state, offload {off}": partial(_resumed, folder, out / f"state {off}", off) for off in (False, True)},
        **{
            f"trainer, plain {plain}, resumed {resumed}": partial(_train, folder, out / f"run {plain}", plain, resumed)
            for plain in ((False, True) if _is_gpu() else (False,))
            for resumed in (False, True)
        },
    }
    if _is_gpu() and dist.get_world_size() == 1:
        cases |= {"memory": partial(_held, folder), "CUDA graphs": partial(_compiled_without_graphs, folder)}
    run_cases(cases)


@on_each
@pytest.mark.shows("bf16", "resumed states", "offload")
def test_all_that_a_device_can_break(device: Any, ranks: int, folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(_all_cases, ranks, folders["llama"], tmp_path, device=device, timeout_s=500)
