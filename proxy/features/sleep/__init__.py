"""Engines sleep while a trainer on their GPUs computes, and wake with the served version."""
