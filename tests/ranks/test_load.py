"""Loading on real ranks: bit for bit what plain from_pretrained gives, from files of every kind, each rank reading its
own bytes; a load that fails ends on every rank with the same error, and what it leaves cannot be used by mistake."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

from hf_fsdp_tools import CheckpointError, add_adapter, from_pretrained, load_adapter, make_accelerator, save_pretrained
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import (
    Runs,
    assert_same_model,
    full,
    full_state,
    loaded,
    lora,
    make_checkpoint,
    pickled_copy,
    plain_model,
    refusal,
    sharded_meta_model,
    stored_tensors,
)
from tests._dist import run_cases, run_ranks
from tests.api import MANIFEST, METADATA, CheckpointIndex, all_ranks
from tests.unit.test_refused_files import Damage, config, described, truncated


def last_even_dim(parameter: nn.Parameter) -> Shard | None:
    """Shard along the last dimension where it divides evenly (FSDP2 asks for that), else along the first."""
    last = parameter.dim() - 1
    return Shard(last) if last > 0 and parameter.shape[last] % dist.get_world_size() == 0 else Shard(0)


def over_two_axes(folders: dict[str, Path], tmp: Path) -> None:
    """The first replica reads and the other receives, each byte once; and shards along other dimensions."""
    kind, bf16 = "mixtral", tmp / "in bf16"
    if dist.get_rank() == 0:
        make_checkpoint(kind, bf16, dtype=torch.bfloat16)
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    stored = CheckpointIndex.open(bf16).num_bytes
    model = sharded_meta_model(kind, bf16, mesh=mesh)
    with preadv(broken, rank=1):
        said = refusal(lambda: load_weights(model, bf16), CheckpointError)
    assert "failed on 1 of 4 ranks" in said and "rank 1: " in said
    for options in ({}, {"dtype": torch.float32, "staging_bytes": 2**20, "requests_in_flight": 1}):
        model = sharded_meta_model(kind, bf16, mesh=mesh)
        report = load_weights(model, bf16, **options)
        assert_same_model(model, plain_model(kind, bf16, dtype=options.get("dtype", torch.bfloat16)))
        buffers = sum(buffer.nbytes for buffer in model.buffers())  # whole on every rank, which reads them for itself
        assert sum(all_ranks(report.bytes_read)) <= 1.02 * stored + 3 * buffers, str(report)
        assert (report.bytes_read > 0.4 * stored) == (dist.get_rank() < 2)
    model = sharded_meta_model(kind, folders[kind], shard_placement_fn=last_even_dim)
    assert any(p.placements == (Shard(1),) for p in model.parameters())
    load_weights(model, folders[kind])
    assert_same_model(model, plain_model(kind, folders[kind]))


def test_other_placements_and_dtypes(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(over_two_axes, 4, folders, tmp_path)


def load_incomplete(folder: Path) -> tuple[Any, ...]:
    config = LlamaConfig.from_pretrained(folder, num_labels=5)
    model = build_meta_model(config, auto_class=AutoModelForSequenceClassification)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    report = load_weights(model, folder, seed=3)
    head = model.score.weight.full_tensor()

    config = LlamaConfig.from_pretrained(folder, vocab_size=77)
    other = build_meta_model(config)
    fully_shard(other)
    mismatched = load_weights(other, folder, ignore_mismatched_sizes=True, seed=3)
    embedding = other.get_input_embeddings().weight.full_tensor()
    assert torch.equal(other.model.norm.weight.full_tensor(), model.model.norm.weight.full_tensor())
    return report, head, mismatched, embedding


def are_alike(two: list[Any], one: list[Any]) -> None:
    """What two ranks and one have of what is in no file."""
    report, head, mismatched, embedding = two[0]
    assert report.missing_keys == report.initialized_keys == ("score.weight",)
    assert report.unexpected_keys == ("lm_head.weight",)
    assert head.shape == (5, 48) and 0.01 < head.std() < 0.04  # the model's own initialisation has 0.02
    assert {key for key, *_ in mismatched.mismatched_keys} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert mismatched.mismatched_keys[0][1:] == ((131, 48), (77, 48))
    for _, other_head, _, other_embedding in (*two, *one):
        assert torch.equal(other_head, head) and torch.equal(other_embedding, embedding)


def untied_copy(folder: Path, target: Path, *, equal: bool = True, has_table: bool = True) -> Path:
    tensors = stored_tensors(folder)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    if not equal:
        tensors["lm_head.weight"][-1, -1] += 1  # one element, on the last rank
    if not has_table:
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load_ties(good: list[Path], bad: Path) -> None:
    for folder in good:
        model = sharded_meta_model("tied", folder)
        report = load_weights(model, folder)
        assert not report.missing_keys
        assert_same_model(model, plain_model("tied", folder), folder.name)
    said = refusal(lambda: load_weights(sharded_meta_model("tied", bad), bad), CheckpointError)
    assert all(part in said for part in ("rank 1: ", "different values", "tie_word_embeddings=False"))


STAGING = 8 * 2**20


def load_large(folder: Path) -> None:
    total = CheckpointIndex.open(folder).num_bytes
    assert total > 130e6
    for dtype in (None, torch.float32):
        model = sharded_meta_model("llama", folder)
        report = load_weights(model, folder, dtype=dtype, staging_bytes=STAGING)
        assert sum(p.to_local().nbytes for p in model.parameters()) == total // (1 if dtype else 2)
        assert report.read_ratio <= 1.01 and report.bytes_read <= 0.51 * total
        assert report.staging_bytes <= STAGING and (report.staging_bytes > 0) == (dtype is not None)
        # What Python and torch allocate meanwhile (modules loaded late, thread stacks) is not staging: 16 MiB.
        assert report.peak_host_bytes <= STAGING + 16 * 2**20, str(report)


def test_memory_above_the_shards_is_bounded_by_the_staging_buffer(tmp_path: Path) -> None:
    """136 MB in bf16; a whole embedding is 33 MB, a rank's shards 68 or, in fp32, 136 MB."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=16000, num_hidden_layers=3, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="90MB")
    run_ranks(load_large, 2, tmp_path)


KINDS = ("deepseek_v3", "tied")


def saved_by_pickle(folders: dict[str, Path], root: Path) -> None:
    """In files, of which one is transposed: its column slices are short runs, and gaps between them are read
    through."""
    ratios = []
    for name in LEGACY:
        folder = root / "legacy" / name
        kind = name.split()[0]
        model = sharded_meta_model(kind, folder)
        report = load_weights(model, folder, allow_pickle=True, dtype=torch.float32)
        assert_same_model(model, plain_model(kind, folders[kind]), name)
        assert not report.missing_keys and not report.unexpected_keys
        ratios.append(report.read_ratio)
    assert max(ratios[:-1]) <= 1.01 and ratios[-1] < 2.2
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        from_pretrained(folder)
    model = from_pretrained(folder, allow_pickle=True)
    assert_same_model(model, plain_model("llama", folders["llama"]), "from_pretrained")


LEGACY: dict[str, dict[str, Any]] = {
    "llama": {"files": 3}, "mixtral": {"files": 3}, "llama transposed": {"files": 1, "transpose": True},
}  # fmt: skip


def save_all(folders: dict[str, Path], root: Path) -> None:
    for kind in KINDS:
        model = loaded(kind, folders[kind])
        optimizer = {f"state.{key}": {"exp_avg": full(t) * 2} for key, t in model.state_dict().items()}
        job = {"app": {"model": model.state_dict(), "optim": optimizer}, "step": 3}
        dcp.save(job, checkpoint_id=root / "job" / kind)
    mesh = init_device_mesh("cpu", (3,))
    model = loaded("mixtral", folders["mixtral"], mesh=mesh, shard_placement_fn=last_even_dim)
    dcp.save(model.state_dict(), checkpoint_id=root / "columns")
    dcp.save(loaded("llama", folders["llama"]).state_dict(), checkpoint_id=root / "plain")


def saved_by_dcp(folders: dict[str, Path], root: Path) -> None:
    for kind, source in [("llama", root / "plain"), *((job.name, job) for job in (root / "job").iterdir())]:
        model = sharded_meta_model(kind, folders[kind])
        report = load_weights(model, source)
        assert_same_model(model, plain_model(kind, folders[kind]), str(source))
        assert not report.missing_keys and not report.unexpected_keys and report.read_ratio <= 1.01, str(report)
    model = sharded_meta_model("mixtral", folders["mixtral"], dtype=torch.bfloat16, shard_placement_fn=last_even_dim)
    report = load_weights(model, root / "columns", dtype=torch.float32)
    assert_same_model(model, plain_model("mixtral", folders["mixtral"]), "columns")
    assert report.read_ratio < 1.5, "half the columns of such tiny chunks: the gaps are shorter than a page"


def into_the_base_model_and_another_head(folders: dict[str, Path], root: Path) -> None:
    """The prefix of the base model is found, and what has no place is told."""
    given = {"config": folders["llama"], "output_loading_info": True}
    base, report = from_pretrained(root / "plain", auto_class=AutoModel, **given)
    assert report.unexpected_keys == ("lm_head.weight",) and not report.missing_keys
    assert torch.equal(full(base.norm.weight), plain_model("llama", folders["llama"]).model.norm.weight)
    headed, report = from_pretrained(
        root / "plain", auto_class=AutoModelForSequenceClassification, num_labels=5, **given
    )
    assert report.missing_keys == report.initialized_keys == ("score.weight",)
    assert full(headed.score.weight).std() > 0


WAYS = (saved_by_dcp, into_the_base_model_and_another_head, saved_by_pickle)


def test_folders_of_every_kind_at_another_number_of_ranks(folders, tmp_path: Path) -> None:
    for name, options in LEGACY.items():
        pickled_copy(folders[name.split()[0]], tmp_path / "legacy" / name, **options)
    run_ranks(save_all, 3, folders, tmp_path)
    run_ranks(run_cases, 2, WAYS, folders, tmp_path)


@contextmanager
def preadv(replacement: Callable[..., int], rank: int) -> Iterator[None]:
    with patch("os.preadv", replacement if dist.get_rank() == rank else os.preadv):
        yield


def broken(*_: Any) -> int:
    raise OSError(5, "Input/output error")


def exhausted(*_: Any) -> int:
    raise MemoryError("no memory")


def failures(folder: Path) -> None:
    """The model is on meta again; over weights that were there, a failed load leaves NaN, not a mixture."""
    model, shrinking, real = sharded_meta_model("llama", folder), folder.parent / "shrinking", os.preadv
    if dist.get_rank() == 0:
        shutil.copytree(folder, shrinking)
    dist.barrier()
    calls: list[int] = []

    def shrink(descriptor: int, buffers: list[memoryview], position: int) -> int:
        calls.append(position)
        if len(calls) == 1:  # a part of what is asked for, and then nothing is left
            os.truncate(os.readlink(f"/proc/self/fd/{descriptor}"), position + 8)
        return real(descriptor, buffers, position)

    with preadv(shrink, rank=1):
        message = refusal(lambda: load_weights(model, shrinking))
    assert "shrank since its header was read" in message and "rank 1" in message
    assert dist.get_rank() == 0 or len(calls) > 1
    with preadv(exhausted, rank=1), pytest.raises((MemoryError, CheckpointError)) as caught:
        load_weights(model, folder)
    kinds = all_ranks((type(caught.value).__name__, str(caught.value)))
    assert kinds[1][0] == "MemoryError" and kinds[0][0] == "CheckpointError" and "rank 1: MemoryError" in kinds[0][1]
    with preadv(broken, rank=1):
        message = refusal(lambda: load_weights(model, folder))
    assert "Reading the checkpoint (the model is on meta again, as it was) failed on 1 of 2 ranks" in message
    assert "rank 1: " in message and "Input/output error" in message
    assert all(p.is_meta for p in model.parameters())
    assert "on meta" in refusal(lambda: save_pretrained(model, folder.parent / "saved"))
    assert not list(folder.parent.glob("saved/*.safetensors"))
    load_weights(model, folder)
    with preadv(broken, rank=1):
        message = refusal(lambda: load_weights(model, folder))
    assert "weights that had storage are partly overwritten, so they were filled with NaN" in message
    assert all(p.to_local().isnan().all() for p in model.parameters())
    load_weights(model, folder)
    assert_same_model(model, plain_model("llama", folder))


def test_two_ranks_load_what_one_does_and_fail_alike_without_a_half_model(folders: Any, tmp_path: Path) -> None:
    """What no file holds, tied weights under one name or both; and every failure is the same on all ranks."""
    folder, tied = Path(shutil.copytree(folders["llama"], tmp_path / "llama")), folders["tied"]
    good = [untied_copy(tied, tmp_path / "equal"), untied_copy(tied, tmp_path / "head", has_table=False)]
    cases: dict[str, Callable[[], Any]] = {
        "incomplete": partial(load_incomplete, folders["llama"]),
        "tied": partial(load_ties, good, untied_copy(tied, tmp_path / "different", equal=False)),
        "failures": partial(failures, folder),
    }
    found = run_ranks(run_cases, 2, cases)
    are_alike([each["incomplete"] for each in found], run_ranks(load_incomplete, 1, folders["llama"]))


# ---- damaged files ----

IDS = torch.arange(3, 19).reshape(1, 16)


def copy(folder: Path, name: str, damage: Damage) -> Path:
    """A copy beside the folder for each rank, that of rank 1 damaged."""
    target = folder.parent / f"{name}-{dist.get_rank()}"
    shutil.copytree(folder, target)
    if dist.get_rank() == 1:
        damage(target)
    dist.barrier()
    return target


def a_config_that_is_damaged_for_one_rank(root: Path) -> None:
    folder = copy(root / "model", "a_list", lambda folder: (folder / "config.json").write_text("[]"))
    message = refusal(lambda: from_pretrained(folder))
    assert message.startswith("Opening the checkpoint failed on 1 of 2 ranks.\nrank 1: "), message
    folder = copy(root / "model", "negative", config(hidden_size=-48))
    assert "is not the same on all nodes: its config is" in refusal(lambda: from_pretrained(folder))


def an_adapter_that_is_damaged_for_one_rank_or_cannot_be_made(root: Path) -> None:
    """Some modules have adapters already when the one is reached that has none."""
    model = from_pretrained(root / "model")
    before = described(model), full_state(model)
    folder = copy(root / "adapter", "cut", truncated)
    message = refusal(lambda: load_adapter(model, folder))
    assert message.startswith("Opening the adapter failed on 1 of 2 ranks.\nrank 1: ")
    assert "adapter_model.safetensors: cannot be read" in message
    is_as_it_was(model, *before)
    assert "PEFT cannot make" in refusal(lambda: add_adapter(model, lora(target_modules=["q_proj", "rotary_emb"])))
    is_as_it_was(model, *before)
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(root / "model"), lora())
    plain.load_adapter(root / "adapter", "default")
    found = load_adapter(model, root / "adapter")(input_ids=IDS).logits
    torch.testing.assert_close(found, plain.eval()(input_ids=IDS).logits)


def is_as_it_was(model: torch.nn.Module, parts: list[Any], state: dict[str, torch.Tensor]) -> None:
    assert described(model) == parts
    now = full_state(model)
    assert now.keys() == state.keys() and all(torch.equal(now[key], state[key]) for key in state)


def run_code(optimizer: Path, marker: Path) -> None:
    """A value that is no tensor lies elsewhere now, where unpickling it runs code."""
    metadata = pickle.loads((optimizer / METADATA).read_bytes())
    torch.save(Runs(marker), optimizer / "more.distcp")
    key = next(key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata))
    index = next(index for index in metadata.storage_data if index.fqn == key)
    metadata.storage_data[index] = _StorageInfo("more.distcp", 0, (optimizer / "more.distcp").stat().st_size)
    (optimizer / METADATA).write_bytes(pickle.dumps(metadata))


def a_state_that_runs_code(root: Path) -> None:
    """`load_state` of Accelerate's; the Trainer checks its checkpoints by the same function."""
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(root / "model", accelerator=accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
    optimizer.step()
    good, bad = accelerator.save_state(root / "good"), root / "bad"
    before = full_state(model)
    if dist.get_rank() == 0:
        run_code(shutil.copytree(good, bad) / "optimizer_0", root / "ran")
        (bad / MANIFEST).unlink()  # the list of files
    dist.barrier()
    assert "could run code" in refusal(lambda: accelerator.load_state(bad))
    now = full_state(model)
    assert not (root / "ran").exists() and all(torch.equal(now[key], before[key]) for key in before)
    accelerator.load_state(good)


def test_every_damage_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama", tmp_path / "model"))
    adapted = get_peft_model(model, lora())
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path / "model")
    cases = (
        a_config_that_is_damaged_for_one_rank,
        an_adapter_that_is_damaged_for_one_rank_or_cannot_be_made,
        a_state_that_runs_code,
    )
    run_ranks(run_cases, 2, cases, tmp_path)
