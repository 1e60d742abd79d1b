"""Sampling replay: what an engine did to a call's logits beside a temperature, applied again to the trainer's."""

from trainer.features.supports.turns import Supports

__all__ = ["Supports"]
