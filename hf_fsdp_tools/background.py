"""One save at a time in the background: a thread of each rank finishes it, and an error stops all ranks together.

The threads agree through rounds of their own (`rounds_apart`), never by collectives, which would come between those of
the training. Whether a save has failed is agreed by all ranks, but each thread learns of it at another moment, at which
the training is at another step on each rank; a rank that stopped alone would leave the others in their next collective.
So the optimizer's steps are counted. A thread that learns of a failure lets the next step of its rank wait, and all
threads agree on the first step that no rank has begun: before that one, every rank raises the error.
"""

from __future__ import annotations  # SaveReport is known to type checkers alone

import atexit
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from functools import cache
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # has no stubs

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.rounds import Rounds, rounds_apart, rounds_of_thread
from hf_fsdp_tools.distributed.steps import Step, at_steps
from hf_fsdp_tools.errors import FSDPToolsError, RanksError
from hf_fsdp_tools.text import show_bytes

if TYPE_CHECKING:
    from hf_fsdp_tools.saving.publish import SaveReport


def wait_for_saves() -> SaveReport | None:
    """Return once no save is under way in the background; the report of the last one, None where there was none.

    The next save, a load by this package and `Trainer.train` wait by themselves; call this before anything else reads
    what is being saved (plain transformers, an upload), and at the end of a script, which otherwise waits, too, but can
    only print an error. Nothing is communicated by the calling thread; every rank should call.

    Raises:
        CheckpointError: the save failed on some rank, for want of space for example; the same on every rank. What was
            saved there before is unchanged. An error is raised once: here, by the next save or load, or by the next
            step of an optimizer.
        RanksError: a rank was lost meanwhile.

    Example:
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> started = save_pretrained(model, "saved-meanwhile", blocking=False)
        >>> report = wait_for_saves()  # training may go on in between
    """
    global _running
    save = _running
    if save is None or save.thread is threading.current_thread():
        return None
    save.thread.join()
    _running = None
    if save.error is not None:
        raise save.error
    return save.report


def in_background(finish: Callable[[], SaveReport], known: SaveReport, start_s: float) -> SaveReport:
    """Finish a save on a thread of its own; what is known of the save now. Every rank must call.

    `finish` writes from copies, agrees with the other ranks by `agreed` and `all_ranks` alone, and begins no thread.
    `start_s` is when the call began that is to return now, by `time.perf_counter`.
    """
    global _running
    assert _running is None, "the call that began this save waits for the one before"
    _count_steps()
    known = replace(known, pause_seconds=round(time.perf_counter() - start_s, 4))
    _running = _Save(finish, known, start_s)
    return known


class _Save:
    """A save that is being finished."""

    def __init__(self, finish: Callable[[], SaveReport], known: SaveReport, start_s: float) -> None:
        self.report: SaveReport | None = None
        self.error: BaseException | None = None
        self.has_failed = False
        self.stops_at: int | None = None
        """The step before which all ranks raise the error, once they have agreed on it."""
        work = (self._run, rounds_apart(), finish, known, start_s)
        # No daemon: a script that ends waits for it. The context has the patience of the caller.
        self.thread = threading.Thread(target=copy_context().run, args=work, name="save")
        self.thread.start()

    def _run(self, rounds: Rounds | None, finish: Callable[[], SaveReport], known: SaveReport, start_s: float) -> None:
        rounds_of_thread.set(rounds)
        try:
            with agreed("saving in the background", known.folder):
                report = replace(
                    finish(),
                    pause_seconds=known.pause_seconds,
                    copied_bytes=known.copied_bytes,
                    seconds=round(time.perf_counter() - start_s, 4),
                )
                if rank_and_size()[0] == 0:
                    _print(report)  # may fail: a terminal is closed
            self.report = report
        except BaseException as error:  # the main thread raises it
            self._fail(error)
        finally:
            if rounds is not None:
                rounds.wait_for_readers()  # the process may end now

    def _fail(self, error: BaseException) -> None:
        """Agree with the other ranks on the step before which all of them raise the error."""
        with _changed:
            self.has_failed = True  # from now on no further step begins
            stops_at = _steps + 1
        if not isinstance(error, RanksError):  # after which nobody comes to a round
            try:
                stops_at = max(all_ranks(stops_at, "agreeing on the step at which to stop"))
            except FSDPToolsError as lost:
                error.add_note(str(lost))
        with _changed:
            self.error, self.stops_at = error, stops_at
            _changed.notify_all()


_running: _Save | None = None
"""The save in the background, until somebody has waited for it."""

_steps = 0
"""Steps of optimizers that this rank has begun since it first saved in the background."""

_changed = threading.Condition()


@cache
def _count_steps() -> None:
    at_steps(Step.STOP, _before_step)
    atexit.register(_at_exit)


def _before_step(optimizer: Any) -> None:
    """Count a step; or raise the error of a save in its place, on all ranks in place of the same one."""
    global _steps
    caller = sys._getframe(2)  # torch's, of all optimizers
    if any(frame.f_code is caller.f_code for frame, _ in walk_stack(caller.f_back)):
        return  # a part of another optimizer's step, as AdamW's of `Muon`'s
    with _changed:
        save, step = _running, _steps + 1
        while save is not None and save.has_failed and save.stops_at is None:
            _changed.wait()
        stops = save is not None and save.stops_at is not None and step >= save.stops_at
        if not stops:
            _steps = step
    if stops:
        wait_for_saves()


def _at_exit() -> None:
    """Say that a save failed of which nobody has heard; the interpreter has waited for its thread."""
    if _running is not None and _running.error is not None:
        print(f"The save in the background failed: {_running.error}", file=sys.stderr, flush=True)


def _print(report: SaveReport) -> None:
    num_bytes, copied = show_bytes(report.total_bytes), show_bytes(report.copied_bytes)
    # Next to the bars of a training, which a plain print would tear.
    tqdm.write(
        f"Saved {report.folder}: {num_bytes} in {report.seconds:.1f} s, of which training paused "
        f"{report.pause_seconds:.2f} s for a copy ({copied} on rank 0).",
        file=sys.stderr,
    )
