"""The training loop and what it needs around an update."""
