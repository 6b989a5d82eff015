"""The stored formats of weights, a class for each."""
