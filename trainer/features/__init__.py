"""Which features stand beside the trainer's core, in the order in which it asks them."""

from __future__ import annotations

from trainer.features.experts import Experts
from trainer.features.images import Images
from trainer.features.supports import Supports
from trainer.model.terms import Term

TERMS: tuple[type[Term], ...] = (Supports, Images, Experts)
