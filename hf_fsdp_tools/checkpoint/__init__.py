"""Hugging Face checkpoints into shards and back, each rank its own bytes."""

from .agreement import agreed
from .index import CheckpointIndex
from .load import load_weights
from .report import LoadReport, SaveReport
from .save import save_pretrained

__all__ = ["CheckpointIndex", "LoadReport", "SaveReport", "agreed", "load_weights", "save_pretrained"]
