"""The features of the proxy, in the order in which they have their parts in a call.

The core imports none of them: the start of a process passes these tuples to it, and it runs with all of them empty. A
setting is declared by its feature, and `Settings` is the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.calls.steps import CallStep
from proxy.dialects.base import Dialect
from proxy.dialects.chat import ChatCompletions
from proxy.features.arms.counts import ArmCalls
from proxy.features.arms.settings import ArmSettings
from proxy.features.compaction.step import ClearedThinking, ManageContext
from proxy.features.completions import TextCompletions
from proxy.features.consent.marks import ConsentStep
from proxy.features.consent.redaction import Redaction
from proxy.features.consent.settings import ConsentSettings
from proxy.features.discovery.settings import DiscoverySettings
from proxy.features.dropped import Dropped
from proxy.features.experts import Experts
from proxy.features.feedback.settings import FeedbackSettings
from proxy.features.formats.gemini import Gemini
from proxy.features.formats.messages import Messages
from proxy.features.formats.responses import Responses
from proxy.features.images import Images, ImageSettings
from proxy.features.limits import CallLimits
from proxy.features.limits.settings import LimitSettings
from proxy.features.pins import PinSettings, PinStep
from proxy.features.policies.settings import PolicySettings
from proxy.features.prices import Prices, PriceSettings
from proxy.features.resumed import Resumed
from proxy.features.retention.settings import RetentionSettings
from proxy.features.roles.chains import Roles
from proxy.features.sleep.settings import SleepSettings
from proxy.features.supports import Supports, SupportSettings
from proxy.features.tracing.settings import TracingSettings
from proxy.features.upstream.settings import UpstreamSettings
from proxy.features.workers.settings import WorkerSettings

if TYPE_CHECKING:
    from proxy.services import Features

STEPS: tuple[type[CallStep], ...] = (
    CallLimits,
    Roles,
    Dropped,
    ConsentStep,
    Redaction,
    Resumed,
    ManageContext,
    ClearedThinking,
    PinStep,
    Images,
    Supports,
    Experts,
    Prices,
    ArmCalls,
)
DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), TextCompletions(), Responses(), Messages(), Gemini())
"""The wire formats. A new one is a module of its own and one entry here."""
IN_STORE: tuple[str, ...] = ("turnwise.features",)
"""Modules that the writing process imports before it opens the store."""

ROUTES: tuple[str, ...] = (
    "proxy.features.other_routes",
    "proxy.features.compaction.routes",
    "proxy.features.page.routes",
    "proxy.features.exports",
    "proxy.features.examples",  # the label `must` has a route of its own, before those of all labels
    "proxy.features.labels",
    "proxy.features.roles.routes",
    "proxy.features.forks",
    "proxy.features.policies.routes",
    "proxy.features.rewinds",
    "proxy.features.remote_claims",
    "proxy.features.lineage",
    "proxy.features.retention.routes",
    "proxy.features.feedback.routes",
    "proxy.features.ratings.routes",
    "proxy.features.limits.routes",
    "proxy.features.upstream.routes",
    "proxy.features.consent.routes",
    "proxy.features.doctor",
)
"""Modules with routes of the control plane; they are imported where the app is built, not for the settings."""


class Settings(
    ImageSettings,
    SleepSettings,
    SupportSettings,
    ArmSettings,
    ConsentSettings,
    PinSettings,
    LimitSettings,
    PolicySettings,
    PriceSettings,
    RetentionSettings,
    FeedbackSettings,
    UpstreamSettings,
    TracingSettings,
    WorkerSettings,
    DiscoverySettings,
):
    """Settings of one proxy with all of its features."""


def served() -> Features:
    """Return what stands beside the core; only a process that serves imports all of it."""
    from proxy.features.arms.trials import Trials
    from proxy.features.discovery.fleet import Fleet
    from proxy.features.engine_checks import EngineChecks
    from proxy.features.exports import Exports
    from proxy.features.freed_memory import FreedMemory
    from proxy.features.inferred import Inferred
    from proxy.features.limits.shared import SharedLimits
    from proxy.features.native_ids import NATIVE_IDS
    from proxy.features.outline.outlines import shorten
    from proxy.features.page.beside import Page
    from proxy.features.policies.names import NamedPolicies
    from proxy.features.proxies import Proxies
    from proxy.features.retention.deletion import Retention
    from proxy.features.retries import Retries, Settling
    from proxy.features.roles.chains import describe
    from proxy.features.sleep.sleeper import Sleeper
    from proxy.features.tracing.observers import Tracing
    from proxy.features.training_note import TrainingNote
    from proxy.features.transfers import MemoryLoader
    from proxy.features.untrained import Untrained
    from proxy.features.upstream.routes import UpstreamClient
    from proxy.features.workers.worker import Workers
    from proxy.reload.parts import ReloadParts
    from proxy.services import Features

    here = (NamedPolicies, Page, Exports, Retention, FreedMemory, UpstreamClient, Tracing, Workers, Fleet, Untrained)
    beside = (*here, SharedLimits, Proxies, TrainingNote, EngineChecks)
    reload = ReloadParts(MemoryLoader, Trials, Sleeper)
    steps: tuple[type[CallStep], ...] = (Settling, *STEPS)
    return Features(steps, IN_STORE, beside, reload, DIALECTS, Retries, Inferred, NATIVE_IDS, describe, shorten)
