"""What is wrong with a live model or a machine, as data: code, fact, cure."""
