"""A rank that is stopped or killed in a load, a prepare or a save ends the others, with one message."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_fsdp_tools import RanksError, from_pretrained, live_weights, save_pretrained, wait_for_saves
from hf_fsdp_tools.distributed import liveness
from tests._dist import LIMIT_S, run_ranks
from tests.api import all_ranks

CONTEXT = multiprocessing.get_context("forkserver")


def once(sent: signal.Signals, function: Callable[..., object]) -> Callable[..., object]:
    """The function, in which rank 1 first lives for a second, so that it is known to be there, and gets a signal."""
    left = [sent] if dist.get_rank() == 1 else []

    def instead(*args: object, **kwargs: object) -> object:
        if left:
            time.sleep(1)
            os.kill(os.getpid(), left.pop())
        return function(*args, **kwargs)

    return instead


def load(folder: Path, sent: signal.Signals) -> None:
    with patch("os.preadv", once(sent, os.preadv)):
        from_pretrained(folder)


def save(folder: Path, sent: signal.Signals) -> None:
    model = from_pretrained(folder)
    with patch("os.pwritev", once(sent, os.pwritev)):
        save_pretrained(model, folder.with_name("saved"))


def save_later(folder: Path, sent: signal.Signals) -> None:
    model = from_pretrained(folder)
    with patch("os.pwritev", once(sent, os.pwritev)):
        save_pretrained(model, folder.with_name("saved"), blocking=False)
        wait_for_saves()


def send(folder: Path, sent: signal.Signals) -> None:
    weights = live_weights(from_pretrained(folder))
    with patch.object(dist, "batch_isend_irecv", once(sent, dist.batch_isend_irecv)):
        weights.send(lambda bucket: None, 2**16)


ROADS = {
    "load": (load, "reading the checkpoint"),
    "save": (save, "(writing|adding up)"),
    "save later": (save_later, "(saving in the background|adding up)"),
    "send": (send, "sending weights"),
}


def stop_on(road: str, folder: Path) -> None:
    """Rank 0 lets rank 1 go on when it has given it up; rank 1 then learns that it was."""
    liveness._BEAT_S, state_of = 0.2, liveness._state_of

    def seen(process: int) -> str:
        """The state of the other rank, which is lost a second after it was seen stopped, and otherwise not so soon."""
        state = state_of(process)
        liveness.SILENT_S = 1 if state == "T" else 60
        return state

    pids = all_ranks(os.getpid())
    call, doing = ROADS[road]
    with patch.object(liveness, "_state_of", seen), pytest.raises(RanksError) as caught:
        try:
            call(folder, signal.SIGSTOP)
        finally:
            if dist.get_rank() == 0:
                os.kill(pids[1], signal.SIGCONT)
    liveness.SILENT_S = 60
    said = rf"While {doing}.*: rank 1 is stopped \(SIGSTOP\) for \d+ s. The others stop."
    assert re.match(said, str(caught.value)), caught.value
    assert len(set(all_ranks(str(caught.value)))) == 1


def test_a_stopped_rank_ends_the_others_and_learns_of_it(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.symlink_to(folders["llama"])
    run_ranks(stop_on, 2, "load", folder)


def live(rank: int, port: int, road: str, folder: Path) -> None:
    """The life of a rank, which leaves the message of its error behind; its parent keeps the store."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=LIMIT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    liveness._BEAT_S = 0.2
    with pytest.raises(RanksError) as caught:
        ROADS[road][0](folder, signal.SIGKILL)
    folder.with_name("message").write_text(str(caught.value))
    os._exit(0)  # without a farewell to a group that is broken


@pytest.mark.parametrize("road", ["load", "send", "save", "save later"])
def test_a_killed_rank_ends_the_others(road: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.symlink_to(folders["llama"])
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    ranks = [CONTEXT.Process(target=live, args=(rank, store.port, road, folder)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(LIMIT_S / 2)
        assert (ranks[0].exitcode, ranks[1].exitcode) == (0, -signal.SIGKILL)
    finally:
        for rank in ranks:
            rank.kill()
    message = (tmp_path / "message").read_text()
    expected = rf"While {ROADS[road][1]}.*: rank 1 has ended: it failed, and says why, or did not make"
    assert re.match(expected, message), message
