"""One call from its request to its stored turns."""
