"""Group commit: one process writes the turns of a proxy."""
