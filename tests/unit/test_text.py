"""What messages are made of: a few of many names, dtypes, sizes."""

import pytest
import torch

from hf_fsdp_tools.text import dtype_name, listed, listed_lines, merge_alike, show_bytes, show_count


def test_a_few_of_many_are_followed_by_the_number_of_the_others() -> None:
    assert listed([]) == ""
    assert listed(iter("abcd")) == "a, b, c, d"
    assert listed(range(16)) == "0, 1, 2, 3 and 12 more"
    assert listed("abcd", 3, separator=" + ") == "a + b + c and 1 more"


def test_a_few_of_many_lines() -> None:
    assert listed_lines([]) == ""
    assert listed_lines("ab", 2) == "- a\n- b"
    assert listed_lines("abc", 2, head="") == "a\nb\n… and 1 more"


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float8_e4m3fn, "float8_e4m3fn")])
def test_a_dtype_is_named_without_its_module(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name


def test_names_that_differ_in_numbers_are_one_and_sizes_are_decimal() -> None:
    assert merge_alike(["layers.0.w", "layers.1.w", "head"]) == ["layers.{0..1}.w", "head"]
    assert (show_bytes(1_234_567), show_count(999), show_count(1_234_567)) == ("1.2 MB", "999", "1.2 M")
