"""What users do in any order, on shards beside one plain process (`tests.acts` has the acts, and runs others by hand).

    ACTS_MINUTES=120 ACTS_SEED=7 pytest -m nightly tests/ranks/test_acts.py

`FOUND` has the shortest scripts of faults that the machine has found, all of them mended.
"""

import itertools
import os
import time
from functools import partial
from pathlib import Path

import pytest

from tests._dist import run_cases, run_ranks
from tests.acts import LAYOUTS, Act, acts_of, drawn, make_files, play, script, search

FIXED = {
    1: {"one rank": 1, "one rank bf16": 1, "one rank lora": 1},
    2: {
        "2 ranks": 1, "2 ranks bf16": 1, "cp": 1, "tp": 2, "ep": 1, "kept": 3, "whole": 4, "lora": 3, "tied": 2,
    },
}  # fmt: skip
"""A seed for each layout, by the number of ranks: in each commit."""
PASS = "loss = model(input_ids=ids(1), labels=ids(1), use_cache=False).loss\n"
BASE = "loss = base(model)(input_ids=ids(1), use_cache=False).last_hidden_state.pow(2).mean()\n"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)\n"
STATE = "kept = {key: value.clone() for key, value in model.state_dict().items()}\n"
LOAD, BACKWARD, STEP = "model = load()\n", "loss.backward()\n", "optimizer.step()\n"
CLIP = "norm = clip_grad_norm_(model.parameters(), 0.5)"
FROZEN = "[p.requires_grad_(False) for name, p in model.named_parameters() if 'norm' in name]\n"
UNFROZEN = "[p.requires_grad_(True) for p in model.parameters()]\n"
WITH_ACCELERATOR = "accelerator = make_accelerator()\nmodel = load(accelerator)\n"
OF_PLAIN = "accelerator = make_accelerator()\nmodel = plain_model()\n"
PREPARED = "model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))\n"
FOUND = {
    "an optimizer made after a pass": ("2 ranks", LOAD + PASS + SGD + PASS + BACKWARD + STEP),
    "an optimizer made after an evaluation, kept": (
        "kept", LOAD + "with torch.no_grad(): " + PASS + SGD + PASS + BACKWARD + STEP,
    ),
    "an optimizer prepared after a base pass without gradients": (
        "2 ranks", WITH_ACCELERATOR + "model = accelerator.prepare(model)\nwith torch.no_grad(): " + BASE
        + "optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1e-2))\n"
        + PASS + "accelerator.backward(loss)\n" + STEP,
    ),
    "a state of an optimizer made after a pass": ("tp", LOAD + PASS + SGD + "store(model, optimizer)"),
    "zeroed after a pass": ("2 ranks", LOAD + PASS + BACKWARD + PASS + "model.zero_grad()\n" + PASS + BACKWARD),
    "clipped after a pass": ("2 ranks", LOAD + PASS + BACKWARD + PASS + CLIP),
    "changed after a pass": ("2 ranks", LOAD + PASS + "[p.data.mul_(0.9) for p in model.parameters()]\n" + STATE),
    "frozen after a pass": ("2 ranks", LOAD + PASS + FROZEN + STATE),
    "an adapter after a pass": ("2 ranks", LOAD + PASS + BASE + "model = with_adapter(model)"),
    "whole, unfrozen": (
        "whole", OF_PLAIN + FROZEN + "model = accelerator.prepare(model)\n" + UNFROZEN + PASS
        + "accelerator.backward(loss)",
    ),
    "a base pass first": ("2 ranks", LOAD + BASE),
    "a base pass where experts are shared": ("ep", LOAD + "with torch.no_grad(): " + PASS + BASE),
    "state dict after a base pass": ("one rank bf16", LOAD + BASE + STATE),
    "changed after a base pass": (
        "one rank bf16", LOAD + BASE + "[p.data.mul_(0.9) for p in model.parameters()]\nwith torch.no_grad(): " + PASS,
    ),
    "saved after a base pass": ("one rank bf16", LOAD + BASE + "save_pretrained(model)"),
    "an offloaded step before a pass": ("offload", LOAD + SGD + STEP),
    "a state of an offloaded model before a pass": ("offload", LOAD + SGD + "store(model, optimizer)"),
    "saved before the first step": (
        "2 ranks", WITH_ACCELERATOR + PREPARED + "accelerator.save_state(folder)\n" + PASS
        + "accelerator.backward(loss)\n" + STEP,
    ),
    "changed after a failed pass": (
        "ep", LOAD + "with failing(model): " + PASS + "[p.data.mul_(0.9) for p in model.parameters()]\n" + STATE,
    ),
    "stepped after a failed pass": (
        "tp", LOAD + SGD + PASS + BACKWARD + PASS.replace("ids(1)", "ids(1) + 999") + STEP + PASS + BACKWARD,
    ),
    "a base pass where rows are shared": ("cp", LOAD + "with torch.no_grad(): " + PASS + BASE + BACKWARD),
    "changed after a failed and a base pass": (
        "2 ranks", LOAD + PASS.replace("ids(1)", "ids(1) + 999") + BASE
        + "[p.data.mul_(0.9) for p in model.parameters()]\n" + STATE,
    ),
    "a copy of an adapted model": ("lora", LOAD + "model = copy.deepcopy(model)"),
    "a copy whose inputs take gradients": (
        "lora bf16", OF_PLAIN + "model = accelerator.prepare(model)\nmodel.gradient_checkpointing_enable()\n"
        + "model = copy.deepcopy(model)\nmodel.merge_adapter()\n" + PASS + "accelerator.backward(loss)",
    ),
    "a state that lacks a part": (
        "whole", LOAD + SGD + BASE + BACKWARD + STEP + "store(model, optimizer)\n" + STEP
        + "restore(model, optimizer)",
    ),
    "a state of nothing": ("one rank", LOAD + "accelerator = make_accelerator()\naccelerator.save_state(folder)"),
    "two steps after a second adapter": (
        "offload", LOAD + "model = with_adapter(model)\n" + PASS + BACKWARD + SGD + "add_second(model)\n" + 2 * STEP,
    ),
    "unmerged after a pass": (
        "kept", WITH_ACCELERATOR + "model = with_adapter(model)\nmodel.merge_adapter()\nwith torch.no_grad(): " + PASS
        + "model.unmerge_adapter()",
    ),
    "changed by an attribute after an evaluation": (
        "kept", LOAD + "with torch.no_grad(): " + PASS + "base(model).layers[0].mlp.down_proj.weight.data.mul_(0.9)\n"
        + STATE + "with torch.no_grad(): " + PASS,
    ),
    "merged and disabled": (
        "lora", LOAD + "model.merge_adapter()\nwith model.disable_adapter(): " + PASS + PASS + BACKWARD,
    ),
    "a merged adapter where layers are shared": (
        "tp", WITH_ACCELERATOR + "model = with_adapter(model)\nmodel.merge_adapter()",
    ),
}  # fmt: skip


def is_right(name: str, acts: list[Act], what: object, parent: Path) -> None:
    """On a rank: no act is wrong, or an error of somebody else."""
    folder = parent / f"{name} {what}"
    folder.mkdir(exist_ok=True)
    told = play(LAYOUTS[name], acts, make_files(LAYOUTS[name], parent), folder)
    assert told[-1][0] in ("right", "refused"), script(name, acts[: len(told)], what, told[-1][1])


@pytest.mark.parametrize("ranks", FIXED)
def test_fixed_sequences(ranks: int, tmp_path: Path) -> None:
    chosen = [(name, drawn(LAYOUTS[name], f"{name} {seed}"), seed) for name, seed in FIXED[ranks].items()]
    mended = [(name, acts_of(text), what) for what, (name, text) in FOUND.items()]
    chosen += [each for each in mended if LAYOUTS[each[0]].ranks == ranks]
    for name, _, _ in chosen:
        make_files(LAYOUTS[name], tmp_path)
    run_ranks(run_cases, ranks, {f"{each[0]} {each[2]}": partial(is_right, *each, tmp_path) for each in chosen})


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_new_sequences() -> None:
    """For half an hour, by a seed of the day."""
    seed = int(os.environ.get("ACTS_SEED", time.strftime("%Y%m%d")))
    until = time.monotonic() + 60 * float(os.environ.get("ACTS_MINUTES", "30"))
    scripts = search(list(LAYOUTS), itertools.count(seed * 1000), until)
    assert not scripts, "\n\n".join(scripts)
