"""The launched ranks of `_launch.launch_series` end with the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.recipes._launch import end_ranks


@pytest.fixture(scope="package", autouse=True)
def ranks_end() -> Iterator[None]:
    yield
    end_ranks()
