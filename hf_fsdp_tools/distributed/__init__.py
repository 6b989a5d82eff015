"""Processes that work together: parallel degrees, the device mesh, and errors that all ranks raise alike."""
