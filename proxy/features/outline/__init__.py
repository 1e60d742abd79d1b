"""Rendering of long conversations in short."""
