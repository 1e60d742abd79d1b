"""Intervals and verdicts from arrays: the one place where the product computes how sure it is.

Pure functions: no store, no settings, no clock. Each takes a `Confidence` that says how often its result is looked at.
"""
