"""What messages are made of: a few of many names, dtypes, sizes."""

import pytest
import torch

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools import text as texts
from hf_fsdp_tools.text import listed, listed_lines, table, within


def test_a_few_of_many_and_names_that_differ_in_numbers() -> None:
    assert listed([]) == listed_lines([]) == ""
    assert listed(iter("abcd")) == "a, b, c, d"
    assert listed(range(16)) == "0, 1, 2, 3 and 12 more"
    assert listed("abcd", 3, separator=" + ") == "a + b + c and 1 more"
    assert listed_lines("ab", 2) == "- a\n- b"
    assert listed_lines("abc", 2, head="") == "a\nb\n… and 1 more"
    assert texts.dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert texts.merge_alike(["layers.0.w", "layers.1.w", "head"]) == ["layers.{0..1}.w", "head"]
    assert (texts.show_bytes(1_234_567), texts.show_count(999), texts.show_count(1_234_567)) == (
        "1.2 MB",
        "999",
        "1.2 M",
    )


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


def test_a_table_is_as_wide_as_its_cells_where_there_is_no_terminal():
    lines = table(WIDE, right={1})
    assert lines[0] == f"{'unit':<35}  count  reason" and lines[2] == f"{'a':<35}      1"
    assert lines[1].endswith("   12  block " + "Siglip" * 8)
    assert len(within("word " * 100).splitlines()) == 1
    assert max(map(len, within("word " * 100, 60).splitlines())) <= 60


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
