"""Checkpoints in an S3 store, on 2 ranks: every bit comes back, bytes are bounded, and what fails or is killed leaves
what was there."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import CheckpointError, ConfigError, from_pretrained, save_pretrained, stores, wait_for_saves
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import (
    add_heads,
    assert_same_model,
    full_state,
    loaded,
    make_checkpoint,
    make_model,
    plain_model,
    refusal,
    stored_tensors,
    word_tokenizer,
)
from tests._dist import named, run_ranks
from tests._store import Server, fail_at, kill_self, on_ranks, s3_server, use
from tests.api import all_ranks, owners_of
from tests.ranks.test_save import Doubled, with_conversion

for _package in ("s3fs", "moto"):
    pytest.importorskip(_package, reason="needs s3fs and moto: pip install 'hf-fsdp-tools[test]'")

SIZE, SLAB = "60KB", 2**17
QUIET = {"load_kwargs": {"progress": False}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as running:
        yield running


def opened(kind: str, name: Any, **options: Any) -> Any:
    return from_pretrained(name, auto_class=type(make_model(kind)), **QUIET, **options)


def fetched(place: str, folder: Path) -> Path:
    if dist.get_rank() == 0:
        fs = fsspec.filesystem("s3")
        fs.invalidate_cache()
        fs.get(f"bucket/{place}", str(folder), recursive=True)
    all_ranks(None)
    return folder


def names_in(place: str) -> dict[str, tuple[int, int]]:
    return {name: there.version for name, there in stores.files_at(f"s3://bucket/{place}").items()}


def a_kind_comes_back(kind: str, folders: dict[str, Path], tmp: Path) -> None:
    """Boxes of either dimension, experts one by one, tied weights; the values are those that a folder would hold."""
    model = loaded(kind, folders[kind])
    report = save_pretrained(
        model, f"s3://bucket/{kind}", max_shard_size=SIZE, staging_bytes=SLAB, processing_class=word_tokenizer()
    )
    saved = fetched(kind, tmp / kind)
    found, expected = stored_tensors(saved), stored_tensors(folders[kind])
    assert found.keys() == expected.keys()
    assert all(t.dtype == found[k].dtype and torch.equal(t, found[k]) for k, t in expected.items()), kind
    assert sum(all_ranks(report.bytes_written)) == sum(file.stat().st_size for file in saved.glob("*.safetensors"))
    assert min(all_ranks(report.bytes_written)) > 0 and not report.gathered_bytes
    assert {*report.files, *report.others} == {file.name for file in saved.iterdir()}
    if dist.get_rank() == 0:
        assert_same_model(plain_model(kind, saved), plain_model(kind, folders[kind]), kind)
    back, loading = opened(kind, f"s3://bucket/{kind}", output_loading_info=True)
    assert loading.read_ratio <= 1.05, "each rank its share, as it counts itself"
    assert back.config.name_or_path == f"s3://bucket/{kind}"
    assert_same_model(back, plain_model(kind, folders[kind]), kind)
    meta = build_meta_model(f"s3://bucket/{kind}/", auto_class=type(back))
    load_weights(meta, f"s3://bucket/{kind}", progress=False)
    assert_same_model(meta, plain_model(kind, folders[kind]), kind)


def dtypes_copies_and_the_next_save(folders: dict[str, Path], tmp: Path) -> None:
    """A save over a save leaves no file of the former; one in the background has the values of the call."""
    model = opened("llama", folders["llama"])
    save_pretrained(model, "s3://bucket/again", max_shard_size=SIZE)
    first = names_in("again")
    before = {key: tensor.clone() for key, tensor in full_state(model).items()}
    started = save_pretrained(model, "s3://bucket/again", dtype=torch.bfloat16, blocking=False, staging_bytes=SLAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = wait_for_saves()
    assert report is not None and report.copied_bytes == report.bytes_written and started.folder == report.folder
    now = names_in("again")
    assert [name for name in now if name.endswith(".safetensors")] == list(report.files) and len(report.files) == 1
    assert first["generation_config.json"] == now["generation_config.json"], "what is the same is not put again"
    back = full_state(opened("llama", "s3://bucket/again"))
    assert all(torch.equal(back[key], tensor.bfloat16()) for key, tensor in before.items())


def plain_safetensors_give_way(folders: dict[str, Path], tmp: Path) -> None:
    """A `model.safetensors` of another program would be opened in place of the index."""
    if dist.get_rank() == 0:
        make_model("llama", seed=3).save_pretrained(tmp / "plain")
        fsspec.filesystem("s3").put(str(tmp / "plain"), "bucket/plain", recursive=True)
    all_ranks(None)
    model = opened("llama", folders["llama"])
    assert not torch.equal(
        full_state(model)["lm_head.weight"], full_state(opened("llama", "s3://bucket/plain"))["lm_head.weight"]
    )
    save_pretrained(model, "s3://bucket/plain")
    assert "model.safetensors" not in names_in("plain")
    assert_same_model(opened("llama", "s3://bucket/plain"), plain_model("llama", folders["llama"]))


def heads(folders: dict[str, Path], tmp: Path) -> None:
    """Heads that no module loads are copied from their files, in a folder or in the store."""
    source = tmp / "with heads"
    if dist.get_rank() == 0:
        make_checkpoint("deepseek_v3", source)
        add_heads(source, {"model.layers.61.eh_proj.weight": torch.randn(48, 96)}, num_nextn_predict_layers=1)
    all_ranks(None)
    save_pretrained(opened("deepseek_v3", source), "s3://bucket/heads", max_shard_size=SIZE, staging_bytes=SLAB)
    found, expected = stored_tensors(fetched("heads", tmp / "heads")), stored_tensors(source)
    assert found.keys() == expected.keys() and all(torch.equal(t, found[k]) for k, t in expected.items())
    from_store = opened("deepseek_v3", "s3://bucket/heads")
    report = save_pretrained(from_store, "s3://bucket/heads again", max_shard_size=SIZE, staging_bytes=SLAB)
    assert report.total_bytes == sum(tensor.nbytes for tensor in expected.values())
    again = stored_tensors(fetched("heads again", tmp / "heads again"))
    assert all(torch.equal(t, again[k]) for k, t in expected.items())


def what_a_conversion_computes(folders: dict[str, Path], tmp: Path) -> None:
    """A conversion that every llama has from then on would need its tensors whole: refused, and nothing is written."""
    plain = with_conversion(folders["llama"], Doubled())
    model = opened("llama", folders["llama"])
    model._weight_conversions = plain._weight_conversions
    said = refusal(lambda: save_pretrained(model, "s3://bucket/gathered", max_shard_size=SIZE))
    assert "are computed, not only moved" in said and not names_in("gathered")


def adapters(folders: dict[str, Path], tmp: Path) -> None:
    from peft import LoraConfig

    base = "s3://bucket/base"
    save_pretrained(opened("llama", folders["llama"]), base, max_shard_size=SIZE)
    model = opened("llama", base, peft_config=LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    report = save_pretrained(model, "s3://bucket/adapter")
    assert report.folder == "s3://bucket/adapter" and set(report.files) <= set(names_in("adapter"))
    back = opened("llama", "s3://bucket/adapter")
    assert back.peft_config["default"].base_model_name_or_path == base
    state = full_state(model)
    assert all(torch.equal(state[key], tensor) for key, tensor in full_state(back).items())
    save_pretrained(model, "s3://bucket/merged", merge_adapters=True)
    save_pretrained(model, tmp / "merged", merge_adapters=True)
    merged = stored_tensors(tmp / "merged")
    found = stored_tensors(fetched("merged", tmp / "fetched"))
    assert found.keys() == merged.keys() and all(torch.equal(t, found[k]) for k, t in merged.items())
    assert "holds a model" in refusal(lambda: save_pretrained(model, base), CheckpointError)
    plain = opened("llama", base)
    assert "holds an adapter" in refusal(lambda: save_pretrained(plain, "s3://bucket/adapter"), CheckpointError)


def bad_names(folders: dict[str, Path], tmp: Path) -> None:
    model = opened("llama", folders["llama"])
    for call, kind, said in (
        (lambda: opened("llama", "s3://bucket/nowhere"), CheckpointError, "No checkpoint at 's3://bucket/nowhere'"),
        (lambda: opened("llama", "gopher://host/run"), ConfigError, "Protocol not known: gopher"),
        (lambda: opened("llama", "gs://bucket/run"), ConfigError, "pip install gcsfs"),
        (lambda: save_pretrained(model, "s3://no-bucket/run"), CheckpointError, "s3://no-bucket/run"),
        (lambda: save_pretrained(model, Path("s3://bucket/run")), ConfigError, "Give it as a text: 's3://bucket/run'"),
        (lambda: save_pretrained(model, "s3://bucket/x", push_to_hub=True), ConfigError, "push_to_hub"),
        (lambda: save_pretrained(model, "memory://run", max_shard_size=SIZE), CheckpointError, "same store for all"),
    ):
        assert said in refusal(call, kind)


FORMER, SAID = "s3://bucket/former", "as the test says"


@pytest.fixture
def former(server: Server, tmp_path: Path) -> dict[str, tuple[int, int]]:
    return put_former(make_checkpoint("llama", tmp_path / "former", seed=7))


def put_former(folder: Path) -> dict[str, tuple[int, int]]:
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    with suppress(FileNotFoundError):
        fs.rm("bucket/former", recursive=True)
    fs.put(str(folder), "bucket/former", recursive=True)
    return names_in("former")


def each_request_fails(rank: str, step: int, how: dict[str, Any], folders: dict[str, Path], tmp: Path) -> None:
    """Of one rank, or of each ("rank"): the former checkpoint opens, bit for bit, and nothing else lies beside it; or
    the new one, whose former files could not be removed."""
    model, names, failed, saved = opened("llama", folders["llama"]), names_in("former"), 0, 0
    model.config.rms_norm_eps = 1e-3
    for n in count(1, step):
        fail_at(rank, n)
        said = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                save_pretrained(model, FORMER, max_shard_size=SIZE, staging_bytes=SLAB, **how)
                wait_for_saves()
            except CheckpointError as error:
                said = str(error)
        assert len(set(all_ranks(said))) == 1, n
        left = fail_at("nobody", 0)
        if said:
            assert SAID in said and FORMER in said, (n, said)
            assert names_in("former") == names, n
            failed += 1
        else:
            state = full_state(model)
            assert all(torch.equal(state[key], t) for key, t in full_state(opened("llama", FORMER)).items()), n
            names = all_ranks(put_former(tmp.parent / "former") if dist.get_rank() == 0 else None)[0]
            fsspec.filesystem("s3").invalidate_cache()
            saved += 1
        if left > 0:
            break
    assert failed and saved
    assert_same_model(opened("llama", FORMER), make_model("llama", seed=7))


CASES: dict[str, Callable[..., None]] = {
    "mixtral": partial(a_kind_comes_back, "mixtral"),
    "dtypes": dtypes_copies_and_the_next_save,
    "the first request fails": partial(each_request_fails, "rank0", 1000, {"blocking": False}),
}
ONCE = (plain_safetensors_give_way, heads, adapters, bad_names, what_a_conversion_computes)
MORE = {"tied": partial(a_kind_comes_back, "tied")} | named(*ONCE)


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.nightly)], ids=["usual", "more"])
def test_what_is_saved_in_a_store_comes_back(
    server: Server, folders: dict[str, Path], former: Any, tmp_path: Path, cases: Any
) -> None:
    server.most.clear()
    (tmp_path / "own").mkdir()
    run_ranks(on_ranks, 2, server.url, cases, folders, tmp_path / "own")
    assert max(server.most.values()) < 2**20, "the files are small, and the bodies as well"


def load_wide(url: str) -> tuple[int, int]:
    use(url, f"rank{dist.get_rank()}")
    _, report = from_pretrained("s3://bucket/wide", output_loading_info=True, **QUIET)
    return report.bytes_read, report.share_bytes


@pytest.mark.nightly
def test_a_rank_reads_its_share_and_no_more(server: Server, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=1024))
    plain.save_pretrained(tmp_path / "wide", max_shard_size="1MB")
    fsspec.filesystem("s3").put(str(tmp_path / "wide"), "bucket/wide", recursive=True)
    server.sent.clear()
    for rank, (read, share) in enumerate(run_ranks(load_wide, 2, server.url)):
        assert share > 2**20 and read <= 1.01 * share
        assert share <= server.sent[f"rank{rank}"] <= 1.05 * share, "headers and all, as the server counts"


def cannot_be_read(folders: dict[str, Path], tmp: Path) -> None:
    """What one rank may not read fails on all, after the headers were read."""
    model = build_meta_model(FORMER)
    text = refusal(lambda: load_weights(model, FORMER, progress=False), CheckpointError)
    assert SAID in text and FORMER in text
    assert all(parameter.is_meta for parameter in model.parameters())


def deny_data(rank: str, method: str, path: str, environ: Any) -> int | None:
    is_data = method == "GET" and "safetensors?" in path and int(environ["HTTP_RANGE"].split("=")[1].split("-")[0]) > 8
    return 403 if is_data and rank == "rank1" else None


FAULTS: dict[str, Any] = {
    "each of rank 0": partial(each_request_fails, "rank0", 1, {}),
    "each of rank 1": partial(each_request_fails, "rank1", 1, {"blocking": False}),
    "one rank may not read": cannot_be_read,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_save_that_fails_leaves_what_was_there(
    server: Server, folders: dict[str, Path], former: Any, tmp_path: Path, name: str
) -> None:
    server.fault = deny_data if FAULTS[name] is cannot_be_read else server.fault
    limits = {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 1}
    (tmp_path / "own").mkdir()
    try:
        run_ranks(
            partial(on_ranks, config_kwargs=limits), 2, server.url, {name: FAULTS[name]}, folders, tmp_path / "own"
        )
    finally:
        server.fault = lambda *_: None


def kill_in_a_save(url: str, folders: dict[str, Path], which: int, at: str) -> None:
    use(url, f"rank{dist.get_rank()}")
    model = opened("llama", folders["llama"])
    if dist.get_rank() == which:
        left = [2]

        def killed(self: Any, *args: Any) -> None:
            left[0] -= 1
            kill_self() if left[0] == 0 or at == "_put" else write(self, *args)

        home = stores.Upload if at != "_put" else owners_of("_put")[0]
        write = getattr(home, at)
        patch.object(home, at, killed).start()
    save_pretrained(model, FORMER, max_shard_size=SIZE, staging_bytes=2**14)


@pytest.mark.parametrize(
    ("which", "at"), [(1, "write"), *(pytest.param(0, at, marks=pytest.mark.nightly) for at in ("commit", "_put"))]
)
def test_a_rank_that_is_killed_in_a_save_leaves_what_was_there(
    server: Server, folders: dict[str, Path], former: dict[str, tuple[int, int]], which: int, at: str
) -> None:
    """Until the index is put; and the next save removes what the killed one left."""
    with pytest.raises(AssertionError, match=r"RanksError") as caught:
        run_ranks(kill_in_a_save, 2, server.url, folders, which, at, timeout_s=120)
    assert f"rank {which}" in str(caught.value)
    use(server.url, "tests")
    now = names_in("former")
    assert {name: now[name] for name in former} == former
    assert_same_model(opened("llama", FORMER), make_model("llama", seed=7))
    save_pretrained(opened("llama", folders["llama"]), FORMER)
    assert len([name for name in names_in("former") if name.endswith(".safetensors")]) == 1
    assert_same_model(opened("llama", FORMER), plain_model("llama", folders["llama"]))
