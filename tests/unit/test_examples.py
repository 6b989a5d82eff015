"""Each public name shows its use, and the examples run: in one process, on the CPU, from a small checkpoint."""

import doctest
import inspect
import os
import warnings

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import hf_fsdp_tools
from tests._checkpoints import make_checkpoint

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """The folder in which examples run: `checkpoint` is a small Llama."""
    folder = tmp_path_factory.mktemp("examples")
    make_checkpoint("llama", folder / "checkpoint")
    return folder


@pytest.fixture(autouse=True)
def accelerate_as_found():
    """An Accelerator that an example makes is the only one of its process."""
    found = dict(os.environ)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(found)


@pytest.mark.parametrize("name", hf_fsdp_tools.__all__)
def test_the_example_of_a_public_name_runs(name, where, monkeypatch):
    monkeypatch.chdir(where)
    names = {each: getattr(hf_fsdp_tools, each) for each in hf_fsdp_tools.__all__} | {"torch": torch}
    text = inspect.getdoc(names[name]) or ""
    (example,) = [doctest.DocTestParser().get_doctest(text, names, name, None, 0)]
    assert any(name in each.source for each in example.examples), f"{name} has no example in its docstring"
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append)
    assert not failed, "".join(said)
