"""Pinned examples as a gate of the weights: what a version answers to them, before engines get it."""
