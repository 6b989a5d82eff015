"""Training states in an S3 store: resumed to the bit by any number of ranks, read by ranges, complete or refused."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import CheckpointError, ConfigError, from_pretrained, stores, wait_for_saves
from hf_fsdp_tools.testing import forget_accelerate
from tests._checkpoints import assert_same_tensors, refusal, small_llama
from tests._dist import run_ranks
from tests._store import Server, kill_self, on_ranks, s3_server, use
from tests._training import batches_of, full_states, make_rows, new_accelerator, train
from tests.api import MANIFEST, UNFINISHED, all_ranks
from tests.ranks.test_whole import state_of_8_bits

for _package in ("s3fs", "moto"):
    pytest.importorskip(_package, reason="needs s3fs and moto: pip install 'hf-fsdp-tools[test]'")

RUN = "s3://bucket/run"
BATCHES = batches_of(make_rows(8), 4)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as running:
        yield running


class Run:
    def __init__(self, source: Any, **options: Any) -> None:
        self.accelerator: Any = new_accelerator()
        torch.manual_seed(3)
        self.model = from_pretrained(
            source, accelerator=self.accelerator, attention_dropout=0.1, load_kwargs={"progress": False}, **options
        ).train()
        self.accelerator.prepare(self.model)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        made = torch.optim.AdamW(parameters, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(made, total_iters=20)
        self.optimizer, self.scheduler = self.accelerator.prepare(made, schedule)

    def train(self, first: int = 0, stop: int = 1) -> list[float]:
        losses = train(self.model, self.optimizer, BATCHES[first:stop], accelerator=self.accelerator)
        self.scheduler.step()
        return losses

    def whole(self) -> dict[str, torch.Tensor]:
        return full_states(self.model, self.optimizer)


def names_in(place: str) -> dict[str, tuple[int, int]]:
    return {
        n: there.version
        for n, there in stores.files_at(f"s3://bucket/{place}", below=stores.STATE_FOLDER_PREFIXES).items()
    }


def resumed_to_the_bit(folders: dict[str, Path], tmp: Path) -> dict[str, torch.Tensor]:
    run = Run(folders["llama"])
    run.train()
    random.seed(dist.get_rank())
    assert run.accelerator.save_state(RUN, checksums=True) == RUN
    saved, expected, drawn = run.whole(), run.train(1, 2), random.random()
    other = Run(folders["llama"])
    other.accelerator.load_state(RUN)
    assert_same_tensors(other.whole(), saved)
    assert other.train(1, 2) == expected and random.random() == drawn
    assert other.scheduler.get_last_lr() == run.scheduler.get_last_lr()
    assert_same_tensors(other.whole(), run.whole())
    names = names_in("run")
    assert UNFINISHED not in names and MANIFEST in names
    assert {"optimizer_0/__0_0.distcp", "optimizer_0/__1_0.distcp", "random_states_1.pkl", "scheduler.bin"} < set(names)
    return saved


def an_adapter_from_copies_on_disks(folders: dict[str, Path], tmp: Path) -> None:
    """LoRA, in the background: what is trained on meanwhile is not in it; a user's own object comes along."""
    from peft import LoraConfig

    def start() -> tuple[Run, Any]:
        run = Run(folders["llama"], peft_config=LoraConfig(r=4, target_modules=["q_proj"]))
        own = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), 1)
        run.accelerator.register_for_checkpointing(own)
        return run, own

    run, own = start()
    run.train()
    own.last_epoch = 17
    run.accelerator.save_state("s3://bucket/lora", blocking=False)
    saved, expected = run.whole(), run.train(1, 2)
    report = wait_for_saves()
    assert report is not None and report.folder == "s3://bucket/lora" and MANIFEST in names_in("lora")
    assert sum(all_ranks(report.bytes_written)) == report.total_bytes
    other, own = start()
    other.accelerator.load_state("s3://bucket/lora")
    assert_same_tensors(other.whole(), saved)
    assert other.train(1, 2) == expected and own.last_epoch == 17


def bad_names(folders: dict[str, Path], tmp: Path) -> None:
    run = Run(folders["llama"])
    accelerator, before = run.accelerator, names_in("run")
    for call, kind, said in (
        (lambda: accelerator.save_state(RUN), CheckpointError, "states in stores are not replaced"),
        (lambda: accelerator.load_state("s3://bucket/nowhere"), CheckpointError, "'s3://bucket/nowhere'"),
        (lambda: accelerator.save_state("gs://bucket/run"), ConfigError, "pip install gcsfs"),
        (lambda: accelerator.save_state(Path(RUN)), ConfigError, f"Give it as a text: {RUN!r}"),
    ):
        assert said in refusal(call, kind)
    naming = ProjectConfiguration(project_dir="s3://bucket/runs", automatic_checkpoint_naming=True)
    with patch.object(accelerator, "project_configuration", naming):
        assert "'s3://bucket/runs' is in a store" in refusal(accelerator.save_state, ConfigError)
    with patch.object(accelerator.state.fsdp_plugin, "state_dict_type", "FULL_STATE_DICT"):
        assert "Set SHARDED_STATE_DICT" in refusal(lambda: accelerator.save_state("s3://bucket/x"), ConfigError)
    assert names_in("run") == before and not names_in("x")


def damaged(folders: dict[str, Path], tmp: Path) -> None:
    fs, run = fsspec.filesystem("s3"), Run(folders["llama"])
    name = "bucket/run/optimizer_0/__1_0.distcp"
    content = fs.cat_file(name)
    for changed, said in (
        (content[:-1] + b"x", "have another checksum"),
        (None, "'optimizer_0/__1_0.distcp' is absent"),
        (content, ""),
    ):
        all_ranks(None)
        if dist.get_rank() == 0:
            fs.rm_file(name) if changed is None else fs.pipe_file(name, changed)
        all_ranks(None)
        if said:
            text = refusal(lambda: run.accelerator.load_state(RUN), CheckpointError)
            assert said in text and RUN in text
    run.accelerator.load_state(RUN)


def elsewhere(url: str, folders: dict[str, Path], saved: dict[str, torch.Tensor]) -> None:
    use(url, f"rank{dist.get_rank()}")
    run = Run(folders["llama"])
    with pytest.warns(UserWarning, match=rf"'{RUN}' was saved by 2 process.es. and is read by 1"):
        run.accelerator.load_state(RUN)
    assert_same_tensors(run.whole(), saved)


@pytest.fixture(scope="module")
def saved(server: Server, folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    first, _ = run_ranks(on_ranks, 2, server.url, [resumed_to_the_bit], folders, None)
    return first["resumed to the bit"]


def test_a_state_in_a_store_is_resumed_to_the_bit(
    server: Server, folders: dict[str, Path], saved: dict[str, torch.Tensor]
) -> None:
    run_ranks(elsewhere, 1, server.url, folders, saved)


@pytest.mark.nightly
def test_other_states_and_what_is_refused(server: Server, folders: dict[str, Path], saved: Any, tmp_path: Path) -> None:
    cases = (an_adapter_from_copies_on_disks, bad_names, damaged)
    run_ranks(on_ranks, 2, server.url, cases, folders, tmp_path)


def wide(url: str, folder: Path, saves: bool) -> int:
    use(url, f"rank{dist.get_rank()}")
    run = Run(folder)
    if saves:
        run.train()
        run.accelerator.save_state("s3://bucket/wide")
    run.accelerator.load_state("s3://bucket/wide")
    states = run.optimizer.optimizer.state.values()
    tensors = [*run.model.parameters(), *(each for state in states for each in state.values())]
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


def of_8_bits(source: Path) -> None:
    """torch reads states that are made of several tensors, from files that the package fetches whole."""
    saved = state_of_8_bits(source, None, "s3://bucket/8 bits")
    forget_accelerate()
    assert_same_tensors(state_of_8_bits(source, "s3://bucket/8 bits", "s3://bucket/8 bits again"), saved)


@pytest.mark.nightly
def test_a_state_of_8_bits_goes_through_a_store(server: Server, tmp_path: Path) -> None:
    run_ranks(on_ranks, 2, server.url, {"8 bits": partial(of_8_bits, small_llama(tmp_path / "model"))})


@pytest.mark.nightly
def test_a_rank_reads_its_share_of_model_and_optimizer(server: Server, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=2048)).save_pretrained(tmp_path)
    for ranks in (2, 3):
        server.sent.clear()
        for rank, share in enumerate(run_ranks(wide, ranks, server.url, tmp_path, ranks == 2)):
            assert share > 2**22 and share <= server.sent[f"rank{rank}"] <= 1.1 * share, (ranks, server.sent, share)


def denied(url: str, folders: dict[str, Path]) -> None:
    use(url, f"rank{dist.get_rank()}", config_kwargs={"retries": {"max_attempts": 0}, "read_timeout": 5})
    run = Run(folders["llama"])
    text = refusal(lambda: run.accelerator.save_state("s3://bucket/denied"), CheckpointError)
    assert "as the test says" in text and "s3://bucket/denied" in text
    run.accelerator.save_state("s3://bucket/denied", blocking=False)
    assert "as the test says" in refusal(wait_for_saves)
    all_ranks(None)
    assert set(names_in("denied")) == {UNFINISHED}
    text = refusal(lambda: run.accelerator.load_state(RUN), CheckpointError)
    assert "as the test says" in text and RUN in text


def deny_rank1(rank: str, method: str, path: str, environ: Any) -> int | None:
    writes, reads = method in ("PUT", "POST") and "distcp" in path, method == "GET" and "run/optimizer_0/__" in path
    return 403 if rank == "rank1" and (writes or reads) else None


def killed_while_it_puts(url: str, folders: dict[str, Path]) -> None:
    use(url, f"rank{dist.get_rank()}")
    run = Run(folders["llama"])
    run.accelerator.load_state(RUN)
    run.train(1, 2)
    if dist.get_rank() == 1:
        fs, left = fsspec.filesystem("s3"), [2]
        put = fs.put_file

        def killed(*args: Any) -> None:
            left[0] -= 1
            kill_self() if left[0] == 0 else put(*args)

        patch.object(fs, "put_file", killed).start()
    run.accelerator.save_state("s3://bucket/next")


def goes_on(url: str, folders: dict[str, Path]) -> None:
    """What was cut off does not load, the state before does; and the next save to that name is whole."""
    use(url, f"rank{dist.get_rank()}")
    run = Run(folders["llama"])
    text = refusal(lambda: run.accelerator.load_state("s3://bucket/next"), CheckpointError)
    assert "'s3://bucket/next' is not complete: the save to it was cut off" in text
    run.accelerator.load_state(RUN)
    run.train(1, 2)
    run.accelerator.save_state("s3://bucket/next")
    other = Run(folders["llama"])
    other.accelerator.load_state("s3://bucket/next")
    assert_same_tensors(other.whole(), run.whole())


@pytest.mark.nightly
def test_what_fails_or_is_killed_damages_nothing(server: Server, folders: dict[str, Path], saved: Any) -> None:
    server.fault = deny_rank1
    try:
        run_ranks(denied, 2, server.url, folders)
    finally:
        server.fault = lambda *_: None
    with pytest.raises(AssertionError, match="RanksError") as caught:
        run_ranks(killed_while_it_puts, 2, server.url, folders, timeout_s=120)
    assert "rank 1" in str(caught.value)
    assert UNFINISHED in (names := names_in("next")) and MANIFEST not in names
    run_ranks(goes_on, 2, server.url, folders)
