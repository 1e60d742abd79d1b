"""Turnwise: an OpenAI-compatible proxy that captures experience, and a trainer that learns from it.

This package is the shared ground of the two processes, and the SDK. Importing it loads nothing heavy: no web
framework, no database driver, no torch.
"""

from __future__ import annotations

__version__ = "0.2.0"
