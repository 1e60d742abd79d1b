"""Lineage: which sessions shaped a version, and what a deletion leaves shaped."""
