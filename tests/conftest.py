"""Tests see no GPU, unless they run ranks on one (`run_ranks(…, device="cuda")`): they pass alike with and without
GPUs."""

from tests._dist import hide_gpus

hide_gpus()
