"""Loading and saving on a stand-in for the CUDA runtime, which counts: contexts, pinned memory, copies, waiting.

Skipped where the stand-in is not set up. Every function here runs on ranks of their own, which see the stand-in's GPUs;
the counts are of one rank's process.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import from_pretrained, save_pretrained
from hf_fsdp_tools.loading.io.files import STAGING_BYTES, STAGING_BYTES_PINNED
from tests._dist import run_ranks
from tests._transfers import read_transfers
from tests.api import Transfer, local_device, row_major_strides, write_transfers
from tests.gpu_stand_in import counts_on, fakegpu

pytestmark = counts_on(2)

BF16, FP32 = torch.bfloat16, torch.float32

CASES: dict[str, tuple[list[tuple[int, ...]], torch.dtype]] = {  # shapes and stored dtype; in memory they are bf16
    "tensors of 16 MiB": ([(2048, 4096)] * 16, BF16),
    "tensors of 32 KiB": ([(64, 256)] * 8000, BF16),
    "fp32 to bf16": ([(2048, 4096)] * 8, FP32),
}


def transfers_of(file: Path, case: str, device: torch.device) -> list[Transfer]:
    """Transfers of tensors that lie one after the other in a file, which is made."""
    shapes, of_file = CASES[case]
    found, start = [], 0
    for shape in shapes:
        memory = torch.empty(shape, dtype=BF16, device=device)
        found.append(Transfer(file=file, start=start, dtype=of_file, strides=row_major_strides(shape), memory=memory))
        start += torch.Size(shape).numel() * of_file.itemsize
    with open(file, "wb") as stream:
        stream.truncate(start)
    return found


def move_counted(move: Callable[[], object], num_bytes: int) -> dict[str, float]:
    """Calls of a move: copies, kernels and waits per GB; calls that set device 0, pinned allocations."""
    torch.cuda.synchronize()
    fakegpu.reset()
    move()
    found = fakegpu.stats()

    def per_gb(*prefixes: str) -> float:
        return 1e9 * sum(count for key, count in found.items() if key.startswith(prefixes)) / num_bytes

    return {
        "H2D": per_gb("copy H2D"),
        "D2H": per_gb("copy D2H"),
        "D2D": per_gb("copy D2D"),
        "kernels": 1e9 * found.get("kernel", 0) / num_bytes,
        "waits": per_gb("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
        "pageable": per_gb("copy H2D pageable", "copy D2H pageable"),
        "sets device 0": found.get("cudaSetDevice 0", 0),
        "pinned blocks": found.get("cudaHostAlloc", 0),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 50 MB in several files."""
    path = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(num_hidden_layers=4, vocab_size=8001, tie_word_embeddings=False, **shape)
    LlamaForCausalLM(config).to(BF16).save_pretrained(path, max_shard_size="20MB")
    return path


def _contexts(folder: Path, out: Path) -> None:
    own = [dist.get_rank()]
    assert fakegpu.contexts() == own
    stacks = fakegpu.trace_contexts()
    model = from_pretrained(folder, load_kwargs={"progress": False})
    assert fakegpu.contexts() == own, stacks
    cast = from_pretrained(folder, dtype=FP32, load_kwargs={"progress": False})
    save_pretrained(model, out / "as it is")
    save_pretrained(cast, out / "cast", dtype=BF16)
    assert fakegpu.contexts() == own, stacks
    calls = fakegpu.stats("cudaSetDevice")
    assert not {name for name in calls if name != f"cudaSetDevice {own[0]}"}, calls


def test_each_rank_has_a_context_on_its_own_device_alone(folder: Path, tmp_path: Path) -> None:
    run_ranks(_contexts, 2, folder, tmp_path, device="cuda")


# ---- transfers ----


def _counts(folder: Path) -> dict[str, dict[str, float]]:
    if dist.get_rank() == 0:
        return {}
    found = {}
    for case in ("tensors of 16 MiB", "tensors of 32 KiB", "fp32 to bf16"):
        transfers = transfers_of(folder / "stored", case, local_device())
        num_bytes = sum(transfer.num_bytes for transfer in transfers)
        for way, move, staging_bytes in (
            ("read", read_transfers, STAGING_BYTES_PINNED),
            ("written", write_transfers, STAGING_BYTES),
        ):
            counts = move_counted(lambda: move(transfers, staging_bytes=staging_bytes), num_bytes)  # noqa: B023
            found[f"{case}, {way}"] = counts
    return found


def test_copies_and_waits_per_gb_stay_below_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of 16 MiB are 60 per GB, of 2 MiB (saving) 477; one copy each, and at most one wait."""
    monkeypatch.setenv("FAKEGPU_KERNELS", "none")  # those that compute on the host copy, too
    _, found = run_ranks(_counts, 2, tmp_path, device="cuda", fresh=True)
    for name, figures in found.items():
        is_read = name.endswith("read")
        batches = 62 if is_read else 490
        there, back = ("H2D", "D2H") if is_read else ("D2H", "H2D")
        assert 50 <= figures[there] <= batches and figures[back] == 0, (name, figures)
        assert figures["D2D"] == figures["pageable"] == figures["sets device 0"] == 0, (name, figures)
        assert figures["waits"] <= batches + 20, (name, figures)
        # One for a batch, and one for each 60 small tensors or more; straight copies need none.
        kernels = 0 if name.startswith("tensors of 16") else batches + 30518 / 60
        assert figures["kernels"] <= kernels, (name, figures)
        blocks = 20  # 16 threads, and a quarter more
        assert figures["pinned blocks"] <= blocks, (name, figures)
