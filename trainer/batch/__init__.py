"""The mathematics of an update: advantages, losses, packed batches."""
