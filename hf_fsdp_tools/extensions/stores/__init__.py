"""Saves that go to a store of fsspec, streamed."""
