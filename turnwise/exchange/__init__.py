"""Data out of the store in formats that other tools read; one module per format."""
