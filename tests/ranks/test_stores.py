"""Checkpoints and training states in stores: on 2 ranks and S3 every bit comes back, bytes are bounded, and what is
refused or killed leaves what was there; stores that lie, on one process."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import CheckpointError, ConfigError, from_pretrained, save_pretrained, stores, wait_for_saves
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import (
    assert_same_model,
    assert_same_tensors,
    full_state,
    loaded,
    make_model,
    plain_model,
    refusal,
    stored_tensors,
)
from tests._dist import run_ranks
from tests._store import Server, fail_at, on_ranks, s3_server, use
from tests._training import new_accelerator
from tests.api import MANIFEST, UNFINISHED, CheckpointIndex, all_ranks, main
from tests.ranks.test_resume import Loop

for _package in ("s3fs", "moto"):
    pytest.importorskip(_package, reason="needs s3fs and moto: pip install 'hf-fsdp-tools[test]'")

SIZE, SLAB = "60KB", 2**17
QUIET = {"load_kwargs": {"progress": False}}
FORMER, RUN, SAID = "s3://bucket/former", "s3://bucket/run", "as the test says"


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
    return {
        n: there.version
        for n, there in stores.files_at(f"s3://bucket/{place}", below=stores.STATE_FOLDER_PREFIXES).items()
    }


def a_kind_comes_back(kind: str, folders: dict[str, Path], tmp: Path) -> None:
    """Boxes of either dimension, experts one by one, tied weights; the values are those that a folder would hold."""
    model = loaded(kind, folders[kind])
    report = save_pretrained(model, f"s3://bucket/{kind}", max_shard_size=SIZE, staging_bytes=SLAB)
    saved = fetched(kind, tmp / kind)
    assert_same_tensors(stored_tensors(saved), stored_tensors(folders[kind]), kind)
    assert sum(all_ranks(report.bytes_written)) == report.total_bytes
    assert min(all_ranks(report.bytes_written)) > 0 and not report.gathered_bytes
    assert {*report.files, *report.others} == {file.name for file in saved.iterdir()}
    back, loading = opened(kind, f"s3://bucket/{kind}", output_loading_info=True)
    assert loading.read_ratio <= 1.05, "each rank its share, as it counts itself"
    assert back.config.name_or_path == f"s3://bucket/{kind}"
    assert_same_model(back, plain_model(kind, folders[kind]), kind)


@pytest.fixture
def former(server: Server, tmp_path: Path) -> dict[str, tuple[int, int]]:
    """One file of another program, which would be opened in place of an index."""
    make_model("llama", seed=7).save_pretrained(tmp_path / "former")
    return put_former(tmp_path / "former")


def put_former(folder: Path) -> dict[str, tuple[int, int]]:
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    with suppress(FileNotFoundError):
        fs.rm("bucket/former", recursive=True)
    fs.put(str(folder), "bucket/former", recursive=True)
    return names_in("former")


def each_request_fails(
    rank: str, step: int, how: str, options: dict[str, Any], folders: dict[str, Path], tmp: Path
) -> None:
    """Of one rank, once or from then on: the former checkpoint opens, bit for bit, and where the store answers again
    nothing else lies beside it; or the new one, whose former files could not be removed."""
    model, names, failed, saved = opened("llama", folders["llama"]), names_in("former"), 0, 0
    model.config.rms_norm_eps = 1e-3
    for n in count(1, step):
        fail_at(rank, n, how)
        said = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                save_pretrained(model, FORMER, max_shard_size=SIZE, staging_bytes=SLAB, **options)
                wait_for_saves()
            except CheckpointError as error:
                said = str(error)
        assert len(set(all_ranks(said))) == 1, n
        left = fail_at("nobody", 0)
        if said:
            assert SAID in said and FORMER in said, (n, said)
            now = names_in("former")
            assert names.items() <= now.items() and (now == names or how == "on"), n
            if how == "on":
                assert_same_model(opened("llama", FORMER), make_model("llama", seed=7))
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
    "the first request fails": partial(each_request_fails, "rank0", 1000, "on", {"blocking": False}),
}
MORE: dict[str, Callable[..., None]] = {
    "tied": partial(a_kind_comes_back, "tied"),
    "each of rank 0": partial(each_request_fails, "rank0", 1, "once", {}),
    "each of rank 1 and all that follow": partial(each_request_fails, "rank1", 1, "on", {"blocking": False}),
}
NO_TRIES = {"config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 5}}


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.nightly)], ids=["usual", "more"])
def test_what_is_saved_in_a_store_comes_back(
    server: Server, folders: dict[str, Path], former: Any, tmp_path: Path, cases: Any
) -> None:
    server.most.clear()
    (tmp_path / "own").mkdir()
    run_ranks(partial(on_ranks, **NO_TRIES), 2, server.url, cases, folders, tmp_path / "own")
    assert max(server.most.values()) < 2**20, "the files are small, and the bodies as well"


def save_over_former(folders: dict[str, Path]) -> None:
    save_pretrained(opened("llama", folders["llama"]), FORMER, max_shard_size=SIZE, staging_bytes=2**14)


@pytest.mark.parametrize(("rank", "n"), [(1, 2), *(pytest.param(0, n, marks=pytest.mark.nightly) for n in (4, 7))])
def test_a_rank_that_is_killed_in_a_save_leaves_what_was_there(
    server: Server, folders: dict[str, Path], former: dict[str, tuple[int, int]], rank: int, n: int
) -> None:
    """Until the index is put; and the next save removes what the killed one left."""
    server.fail(f"rank{rank}", n, "kill")
    with pytest.raises(AssertionError, match=rf"(?s)RanksError.*rank {rank}"):
        run_ranks(on_ranks, 2, server.url, [save_over_former], folders, timeout_s=120)
    use(server.url, "tests")
    now = names_in("former")
    assert {name: now[name] for name in former} == former
    assert_same_model(opened("llama", FORMER), make_model("llama", seed=7))
    save_pretrained(opened("llama", folders["llama"]), FORMER)
    assert len([name for name in names_in("former") if name.endswith(".safetensors")]) == 1
    assert_same_model(opened("llama", FORMER), plain_model("llama", folders["llama"]))


def loop(source: Path) -> Any:
    return Loop(new_accelerator(), source, sharded_before=True)


def resumed_to_the_bit(folders: dict[str, Path], place: str = RUN, *, blocking: bool = True) -> dict[str, torch.Tensor]:
    """In the background what is trained on meanwhile is not in it."""
    run = loop(folders["llama"])
    run.train(1)
    random.seed(dist.get_rank())
    assert run.accelerator.save_state(place, checksums=True, blocking=blocking) == place
    saved, expected, drawn, trained = run.whole(), run.train(1), random.random(), run.whole()
    report = wait_for_saves()
    assert blocking or (report is not None and sum(all_ranks(report.bytes_written)) == report.total_bytes)
    other = loop(folders["llama"])
    other.accelerator.load_state(place)
    other.skip(1)
    assert_same_tensors(other.whole(), saved)
    assert other.train(1) == expected and random.random() == drawn
    assert_same_tensors(other.whole(), trained)
    names = names_in(place.removeprefix("s3://bucket/"))
    assert UNFINISHED not in names and MANIFEST in names
    assert {"optimizer_0/__0_0.distcp", "optimizer_0/__1_0.distcp", "random_states_1.pkl", "scheduler.bin"} < set(names)
    return saved


def elsewhere(folders: dict[str, Path], saved: dict[str, torch.Tensor]) -> None:
    run = loop(folders["llama"])
    with pytest.warns(UserWarning, match=rf"'{RUN}' was saved by 2 process.es. and is read by 1"):
        run.accelerator.load_state(RUN)
    assert_same_tensors(run.whole(), saved)


@pytest.fixture(scope="module")
def saved(server: Server, folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    return run_ranks(on_ranks, 2, server.url, {"saved": resumed_to_the_bit}, folders)[0]["saved"]


def test_a_state_in_a_store_is_resumed_to_the_bit(server: Server, folders: dict[str, Path], saved: Any) -> None:
    run_ranks(on_ranks, 1, server.url, [elsewhere], folders, saved)


def what_cannot_be(folders: dict[str, Path]) -> None:
    model, before = opened("llama", folders["llama"]), names_in("run")
    accelerator = loop(folders["llama"]).accelerator
    rows: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: opened("llama", "s3://bucket/nowhere"), CheckpointError, "No checkpoint at 's3://bucket/nowhere'"),
        (lambda: opened("llama", "gopher://host/run"), ConfigError, "Protocol not known: gopher"),
        (lambda: opened("llama", "gs://bucket/run"), ConfigError, "pip install gcsfs"),
        (lambda: save_pretrained(model, "s3://no-bucket/run"), CheckpointError, "s3://no-bucket/run"),
        (lambda: save_pretrained(model, Path("s3://bucket/run")), ConfigError, "Give it as a text: 's3://bucket/run'"),
        (lambda: save_pretrained(model, "s3://bucket/x", push_to_hub=True), ConfigError, "push_to_hub"),
        (lambda: save_pretrained(model, "memory://run", max_shard_size=SIZE), CheckpointError, "same store for all"),
        (lambda: accelerator.save_state(RUN), CheckpointError, "states in stores are not replaced"),
        (lambda: accelerator.save_state(Path(RUN)), ConfigError, f"Give it as a text: {RUN!r}"),
    ]
    for call, kind, said in rows:
        assert said in refusal(call, kind)
    assert names_in("run") == before and not names_in("x")


def wide(folder: Path, saves: bool) -> tuple[int, int, int]:
    """Bytes of this rank's share of model and optimizer, and those that a load of the weights read."""
    model, report = from_pretrained("s3://bucket/wide model", output_loading_info=True, **QUIET)
    del model
    run = loop(folder)
    if saves:
        run.train(1)
        run.accelerator.save_state("s3://bucket/wide")
    run.accelerator.load_state("s3://bucket/wide")
    states = run.optimizer.optimizer.state.values()
    tensors = [*run.model.parameters(), *(each for state in states for each in state.values())]
    share = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)
    return report.share_bytes, report.bytes_read, share


@pytest.mark.nightly
def test_a_rank_reads_its_share_and_no_more(server: Server, tmp_path: Path) -> None:
    """Of weights, and of a state; headers and all, as the server counts."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=2048))
    plain.save_pretrained(tmp_path, max_shard_size="1MB")
    fsspec.filesystem("s3").put(str(tmp_path), "bucket/wide model", recursive=True)
    for ranks in (2, 3):
        server.sent.clear()
        found = run_ranks(on_ranks, ranks, server.url, {"wide": wide}, tmp_path, ranks == 2)
        for rank, (of_weights, read, share) in enumerate(each["wide"] for each in found):
            assert of_weights > 2**20 and read <= 1.01 * of_weights
            share += of_weights
            assert share > 2**22 and share <= server.sent[f"rank{rank}"] <= 1.1 * share, (ranks, server.sent, share)


def denied(folders: dict[str, Path]) -> None:
    """What one rank may not write fails on all."""
    run = loop(folders["llama"])
    text = refusal(partial(run.accelerator.save_state, "s3://bucket/denied"), CheckpointError)
    assert SAID in text and "s3://bucket/denied" in text
    run.accelerator.save_state("s3://bucket/denied", blocking=False)
    assert SAID in refusal(wait_for_saves)
    all_ranks(None)
    assert set(names_in("denied")) == {UNFINISHED}


def save_the_next(folders: dict[str, Path], goes_on: bool) -> None:
    """What was cut off does not load, the state before does; and the next save to that name is whole."""
    run = loop(folders["llama"])
    if goes_on:
        text = refusal(lambda: run.accelerator.load_state("s3://bucket/next"), CheckpointError)
        assert "'s3://bucket/next' is not complete: the save to it was cut off" in text
    run.accelerator.load_state(RUN)
    run.train(1)
    run.accelerator.save_state("s3://bucket/next")
    other = loop(folders["llama"])
    other.accelerator.load_state("s3://bucket/next")
    assert_same_tensors(other.whole(), run.whole())


@pytest.mark.nightly
def test_what_is_refused_denied_or_killed_damages_nothing(
    server: Server, folders: dict[str, Path], former: Any, saved: Any
) -> None:
    in_background = partial(resumed_to_the_bit, place="s3://bucket/later", blocking=False)
    run_ranks(on_ranks, 2, server.url, {"refused": what_cannot_be, "in the background": in_background}, folders)
    server.fail("rank1", 1, "on")
    run_ranks(partial(on_ranks, **NO_TRIES), 2, server.url, [denied], folders)
    server.fail("rank1", 2, "kill")
    with pytest.raises(AssertionError, match=r"(?s)RanksError.*rank 1|rank 1.*RanksError"):
        run_ranks(on_ranks, 2, server.url, [save_the_next], folders, False, timeout_s=120)
    use(server.url, "tests")
    assert UNFINISHED in (names := names_in("next")) and MANIFEST not in names
    run_ranks(on_ranks, 2, server.url, [save_the_next], folders, True)


@pytest.fixture
def store(folders: dict[str, Path]) -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.put(str(folders["llama"]), "/run", recursive=True)
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def test_no_password_of_a_url_is_written_or_shown(
    store: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "memory://me:hunter2@host/run"
    store.put(str(folders["llama"]), "/me:hunter2@host/run", recursive=True)
    model = from_pretrained(url, peft_config={"peft_type": "LORA", "target_modules": ["q_proj"]}, **QUIET)
    save_pretrained(model, tmp_path)
    assert save_pretrained(model, "memory://me:hunter2@host/new").folder == "memory://host/new"
    with pytest.raises(CheckpointError, match="'memory://host/run' holds a model") as caught:
        save_pretrained(model, url)
    store.pipe_file("/me:hunter2@host/run/config.json", b"{")
    with pytest.raises(CheckpointError, match=r"memory://host/run/config.json") as opened:
        from_pretrained(url, **QUIET)
    said = "'me:hunter2@host' is no bucket: memory://me:hunter2@host/?signature=hunter2"
    monkeypatch.setattr(store, "ls", Mock(side_effect=OSError(said)))
    with pytest.raises(CheckpointError, match="Cannot list 'memory://host/run': OSError: 'host' is no") as listed:
        from_pretrained(url, **QUIET)
    written = [file.read_text() for file in tmp_path.iterdir() if file.suffix in (".json", ".md")]
    assert len(written) > 1 and "hunter2" not in f"{written} {caught.value} {opened.value} {listed.value}"


@pytest.mark.parametrize(
    "entry",
    [{"name": "/run/a\0.bin", "size": 1}, {"name": f"/run/{'a' * 300}.bin", "size": 1}, {"name": "/run/b.bin"}]
    + [{"name": "/run/b.bin", "size": size} for size in (-1, 2**62, "x", [1])],
)
def test_a_store_that_lies_is_one_error(store: Any, entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    files = store.ls("/run", detail=True)
    monkeypatch.setattr(store, "ls", lambda *args, **options: [*files, {"type": "file", **entry}])
    with pytest.raises(CheckpointError, match=r"Cannot (list|open) 'memory://run'"):
        from_pretrained("memory://run", **QUIET)


def test_a_place_in_errors_and_a_file_that_is_replaced_meanwhile(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    index, model = CheckpointIndex.open("memory://run"), build_meta_model("memory://run")
    for name in [name for name in store.store if name.endswith(".safetensors")]:
        store.pipe_file(name, store.cat_file(name)[:-1] + b" ")
    with pytest.raises(CheckpointError, match="was replaced"):
        load_weights(model, index, progress=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert main(["plan", "memory://run"]) in (0, None)
    assert "LlamaDecoderLayer" in capsys.readouterr().out
    for name, content, said in (
        ("model.safetensors.index.json", b"{", "is not valid JSON"),
        ("model.safetensors", (2**60).to_bytes(8, "little") + b"{}", "cannot be read as safetensors"),
    ):
        store.pipe_file(f"/run/{name}", content)
        with pytest.raises(CheckpointError, match=rf"memory://run/{name}: {said}"):
            from_pretrained("memory://run", **QUIET)
