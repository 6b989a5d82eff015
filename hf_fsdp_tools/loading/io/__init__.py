"""Bytes between files and memory."""
