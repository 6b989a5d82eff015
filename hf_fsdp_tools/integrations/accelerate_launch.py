"""`accelerate launch`, with one line at its end where a rank fails: what was wrong, the rank itself has said before."""

import signal
import subprocess
import sys

from accelerate.commands.launch import main as launch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    """Launch what the command line says."""
    try:
        launch()
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        raise SystemExit(_ended(f"rank {rank}", failure.exitcode)) from None
    except (KeyboardInterrupt, SignalException) as stopped:
        number = getattr(stopped, "sigval", signal.SIGINT)
        name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        print(f"hf-fsdp: {name}", file=sys.stderr)
        raise SystemExit(128 + number) from None  # as shells have it
    except subprocess.CalledProcessError as failed:  # a world of one
        raise SystemExit(_ended("the process", failed.returncode)) from None


def _ended(name: str, code: int) -> str:
    if code >= 0:
        return f"hf-fsdp: {name} ended with exit code {code}; its error stands above"
    about = " (the machine's memory was full, or a scheduler ended the job)" if -code == signal.SIGKILL else ""
    return f"hf-fsdp: {name} was ended by {signal.Signals(-code).name}{about}"


if __name__ == "__main__":
    main()
