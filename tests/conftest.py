"""Tests see no GPU, unless they run ranks on one (`run_ranks(…, device="cuda")`): they pass alike with and without
GPUs. Checkpoints that are read alone are made once. No test leaves a process group, Accelerate's state, variables of
the environment, or silence, to the next."""

import gc
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import hypothesis
import psutil
import pytest
from packaging.version import Version

from hf_fsdp_tools.cli import options
from hf_fsdp_tools.testing import forget_accelerate
from tests._cost import GB_PER_WORKER, Costs, in_order
from tests._dist import hide_gpus, start_ranks_warm
from tests.api import patched

gc.disable()  # until all is imported, of which nothing goes away
# As ranks have it: at these sizes a second thread waits more than it helps.
os.environ.setdefault("OMP_NUM_THREADS", "1")
hide_gpus()
# The same examples each time, and no limits of time, for a busy machine is no defect; --hypothesis-profile=default has.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("tests")
options.FIRST_S = 600.0  # a command on a busy machine says nothing of progress
os.environ.pop("COLUMNS", None)  # tables are as wide as they are
_OF_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "MV2_", "PMI_", "MPI_")
_OF_OTHERS += ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "NCCL_SOCKET", "GLOO_SOCKET", "HF_", "TRANSFORMERS_")
for _name in [name for name in os.environ if name.startswith(_OF_OTHERS)]:
    del os.environ[_name]  # of a job within which the tests run, or of a person's shell
_home = tempfile.TemporaryDirectory(prefix="hf-home-")  # nobody's caches, wherever the tests run
os.environ["HF_HOME"] = _home.name
if "SHARDINGS_OF_RUN" not in os.environ:  # the workers of xdist have it from the process that starts them
    _shardings = tempfile.TemporaryDirectory(prefix="shardings-")
    os.environ["SHARDINGS_OF_RUN"] = _shardings.name  # of `tests._shardings`
for _name in ("no_proxy", "NO_PROXY"):  # the hubs of the tests are on this machine
    os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), "127.0.0.1", "localhost"]))


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "write the CPU seconds of each file, for tests/durations.json"
    parser.addoption("--durations-to", metavar="FILE", help=said)
    parser.addoption("--shuffle", type=int, metavar="SEED", help="the files in an order that the seed draws")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config))
    if config.getoption("markexpr") == "nightly":
        start_ranks_warm(False)  # the suite does not depend on what the warm server leaves to its ranks


NEEDED = re.compile(r"needs (torch|transformers|accelerate) (\d+\.\d+) or newer")
"""How the package says that an older library lacks something (docs/migrate.md): a test of it is skipped there."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed and call.excinfo is not None:
        cases = re.split(r"^--- case ", str(call.excinfo.value), flags=re.MULTILINE)
        said = [NEEDED.search(case) for case in cases[1:] or cases]
        if all(each and Version(version(each[1])) < Version(each[2]) for each in said):
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"it {said[0][0]}")
    return report


SMOKE = ("test_architecture.py", "unit/test_documents.py", "unit/test_arguments.py", "unit/test_setups.py")
SMOKE += ("ranks/test_shard.py",)
"""The tests before a commit, `pytest -m smoke`: no other file is imported."""


def is_smoke(path: Path) -> bool:
    return str(path.relative_to(Path(__file__).parent)) in SMOKE


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_file = collection_path.suffix == ".py" and collection_path.is_relative_to(Path(__file__).parent)
    return True if is_file and config.getoption("markexpr") == "smoke" and not is_smoke(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    if is_smoke(item.path) and not any(item.iter_markers("nightly")):
        item.add_marker("smoke")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    in_order(items, config.getoption("shuffle"))


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection looks through imports
    gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: as many as there are cores and memory for. (One more took 631 s in place of 594, on two cores.)"""
    return max(1, min(len(os.sched_getaffinity(0)), psutil.virtual_memory().available // (GB_PER_WORKER * 2**30)))


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
    forget_accelerate()
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture
def patch_inner() -> Iterator[Callable[..., None]]:
    """Lets inner names of other rooms be something else until the test ends: `tests.api.patched`."""
    with ExitStack() as stack:
        yield lambda **values: stack.enter_context(patched(**values))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every kind, in fp32; no test changes it."""
    from tests._checkpoints import KINDS, make_checkpoint  # not before GPUs are hidden

    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, root / kind) for kind in KINDS}
