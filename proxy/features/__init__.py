"""The features of the proxy, in the order in which they have their parts in a call.

The core imports none of them: the start of a process passes these tuples to it, and it runs with all of them empty. A
setting is declared by its feature, and `Settings` is the sum.
"""

from proxy.calls.steps import CallStep
from proxy.features.prices import Prices, PriceSettings
from proxy.settings import ProxySettings

STEPS: tuple[type[CallStep], ...] = (Prices,)
IN_STORE: tuple[str, ...] = ("turnwise.features",)
"""Modules that the writing process imports before it opens the store."""

ROUTES: tuple[str, ...] = ("proxy.features.labels",)
"""Modules with routes of the control plane; they are imported where the app is built, not for the settings."""


class Settings(PriceSettings, ProxySettings):
    """Settings of one proxy with all of its features."""
