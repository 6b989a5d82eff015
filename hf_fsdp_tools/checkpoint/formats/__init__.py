"""What one file or folder of a checkpoint holds, and where its bytes lie."""
