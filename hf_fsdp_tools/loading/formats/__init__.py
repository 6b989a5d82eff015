"""Parse the formats of checkpoints: the tensors of a file or folder, and where their bytes lie."""
