"""What messages are made of: a few of many names, dtypes, sizes."""

import pytest

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools import text as texts
from hf_fsdp_tools.text import table, within


def test_what_leaves_the_program_has_no_passwords_and_nothing_that_a_terminal_or_a_file_obeys() -> None:
    text = "Cannot read 's3://me:p@ss@host/run?X-Amz-Signature=abc' and 'https://h/a#b'\n\x1b[2J\u2028\u202ex"
    safe = "Cannot read 's3://host/run' and 'https://h/a'\n\\x1b[2J\\u2028\\u202ex"
    assert texts.printable(text) == str(ConfigError(text)) == safe and len(str(ConfigError("a" * 10**6))) == 10_000
    for url, shown in (
        ("zip://x::http://user:hunter2@h/a.zip", "zip://x::http://h/a.zip"),
        ("http://a.org/x,http://user:hunter2@h/y", "http://a.org/x,http://h/y"),
        ("http://user:pa/ss@h/x and http://b.org/@me", "http://h/x and http://b.org/@me"),
        ("http://a/b;token=1", "http://a/b"),
    ):
        assert texts.printable(url) == shown
    assert texts.comment("a\nb: 1\r\x85c") == "# a b: 1\\r\\x85c" and texts.comment("") == "#"


WIDE = [("unit", "count", "reason"), ("model.vision.encoder.layers.{0..11}", "12", "block " + "Siglip" * 8), ("a", "1")]


@pytest.mark.parametrize("columns", [50, 80])
def test_lines_fit_the_terminal_and_nothing_is_lost(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = table(WIDE, right={1}, indent="  ")
    assert max(map(len, lines)) <= columns
    middle = lines[0].index("reason")
    left = "".join(line[:middle] for line in lines[1:]).replace(" ", "")
    assert left.replace("12", "", 1) == "model.vision.encoder.layers.{0..11}a1"
    assert "".join(line[middle:] for line in lines[1:]).replace(" ", "") == "block" + "Siglip" * 8
    text = within("  note  " + "word " * 50)
    assert max(map(len, text.splitlines())) <= columns and text.splitlines()[1].startswith("      word")
    assert "".join(text.split()) == "note" + "word" * 50
