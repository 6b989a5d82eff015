"""Tests see no GPU, unless they run ranks on one (`run_ranks(…, device="cuda")`): they pass alike with and without
GPUs. Checkpoints that are read alone are made once."""

from pathlib import Path

import pytest

from tests._dist import hide_gpus

hide_gpus()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every kind, in fp32; no test changes it."""
    from tests._checkpoints import KINDS, make_checkpoint  # not before GPUs are hidden

    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, root / kind) for kind in KINDS}
