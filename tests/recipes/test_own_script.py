"""The tutorial on a script of one's own: what its page shows is printed again, and the loss falls."""

import re

import pytest

pytest.importorskip("trl")

from tests._documents import ROOT, TEXTS


@pytest.mark.nightly
def test_the_commands_of_the_tutorial_print_what_its_page_shows(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import paste

    monkeypatch.setattr(paste, "RECORDS", tmp_path)
    commands = re.findall(r"<!-- recorded: (.+?)(?: \| tail -n \d+)? -->", TEXTS["docs/own_script.md"])
    paste.record(commands)
    finetuned, plan, launched, files = (paste.recorded(command) for command in commands)
    assert "checkpoint       start" in "\n".join(finetuned) and "LlamaForCausalLM: 1.3 M parameters in 7 units" in plan
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", "\n".join(launched))]
    assert len(losses) == 4 and losses[-1] < losses[0] and "is trained over 2 ranks" in "\n".join(launched)
    assert {"model.safetensors", "checkpoint_manifest.json"} <= {*files}
