"""The table of certificates, and which types are run again."""

import json
from pathlib import Path
from typing import Any

from tests.census import certificates, rows
from tests.census.certificates import COLUMNS, cells_of, table
from tests.census.rows import Census, code_of


def row(name: str, verdict: str, **more: Any) -> dict[str, Any]:
    return {"type": name, "verdict": verdict, "why": "", "seconds": 1.0, **more}


def test_a_type_has_a_mark_for_each_column_and_a_reason_where_it_does_not_agree() -> None:
    found: dict[str, Any] = {name: {} for name in certificates.CENSUSES}
    found["plan"] = {"llama": row("llama", "agrees"), "vit": row("vit", "agrees")}
    found["fsdp"] = {"vit": row("vit", "failed", fp32_load="ok", why="fp32_loss: loss: 1e-1")}
    found["fsdp_packed"] = {"llama": row("llama", "agrees", fp32_load="ok", kinds="rows padded packed")}
    found["cp2"] = {"llama": row("llama", "refused", why="ConfigError: not so")}
    found["tp2"] = {"llama": row("llama", "failed", why="bf16_loss: loss: 1e-1; bf16_norm: 2e-1")}
    assert [mark for mark, _ in cells_of("llama", found)] == [
        "✓",
        "✓",
        "✓",
        "in bf16",
        "–",
        "refused",
        "✓",
        "–",
        "–",
        "–",
        "–",
        "–",
    ]
    assert [mark for mark, _ in cells_of("vit", found)][:3] == ["✓", "✓", "differs"]
    text = table(found)
    assert "| llama | refused | CP 2 | ConfigError: not so |" in text
    assert "| vit | differs | FSDP | fp32_loss: loss: 1e-1 |" in text
    assert f"| ✓ | 2 | 2 | 1 |{' 0 |' * 3} 1 |{' 0 |' * 5}" in text and text.count("| recomputed routers |") == 2
    assert len(COLUMNS) == 12


def test_only_types_whose_code_changed_are_run_again(tmp_path: Path, monkeypatch: Any) -> None:
    """The code of a type is its own, and that of the types from which it takes some."""
    done: list[str] = []

    def prepared(model_type: str, folder: Path) -> dict[str, Any]:
        raise AssertionError("runs in a process of its own")

    census = Census(about="", takes_part=lambda name: name in ("llama", "mixtral"), prepare=prepared)
    monkeypatch.setattr(
        Census, "row_of", lambda self, name: done.append(name) or row(name, "agrees", code=code_of(name))
    )
    output = tmp_path / "rows.jsonl"
    for expected in (["llama", "mixtral"], []):
        done.clear()
        census.write(output, [], 1)
        assert sorted(done) == expected
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    output.write_text(
        "".join(json.dumps(each | ({"code": "older"} if each["type"] == "llama" else {})) + "\n" for each in lines)
    )
    done.clear()
    census.write(output, [], 1)
    assert done == ["llama"]
    assert len({code_of(name) for name in ("llama", "mixtral", "gemma3", "siglip")}) == 4
    assert rows.code_of.cache_info().hits > 0
