"""Recorded calls, made again: the export format `replay` and the command `turnwise replay`."""
