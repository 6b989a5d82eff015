"""What is built on the core and can be taken off: without this folder, or a part of it, the core runs."""
