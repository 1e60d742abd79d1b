"""Data out of the store in formats that other tools read, and conversations of other tools into it."""
