"""Tests see no GPU, unless they run ranks on one (`run_ranks(…, device="cuda")`): they pass alike with and without
GPUs. Checkpoints that are read alone are made once. No test leaves a process group, variables of the environment, or
silence, to the next."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import hypothesis
import pytest

from tests._dist import hide_gpus

hide_gpus()
# The same examples each time, and no limits of time: a busy machine is no defect. For others: --hypothesis-seed=random
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("tests")
os.environ.pop("COLUMNS", None)  # tables are as wide as they are


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """`from_pretrained` starts a process group of one; the CLI silences transformers for its own process; importing a
    benchmark sets variables, which the server that forks ranks would keep."""
    import torch.distributed as dist  # not before GPUs are hidden
    import transformers

    had_group, verbosity = dist.is_initialized(), transformers.logging.get_verbosity()
    with patch.dict(os.environ):
        yield
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every kind, in fp32; no test changes it."""
    from tests._checkpoints import KINDS, make_checkpoint  # not before GPUs are hidden

    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, root / kind) for kind in KINDS}
