"""Which features stand beside the trainer's core, in the order in which it asks them, and the sum of all settings."""

from __future__ import annotations

from trainer.features.consent import Consent
from trainer.features.critic import critics_of
from trainer.features.devices import DevicesSettings, check_divisible, leave_world, place_of
from trainer.features.estimates import Estimates, EstimateSettings, KeptSessions
from trainer.features.evaluation import Evaluation, EvaluationSettings
from trainer.features.examples.gate import ExampleGate, ExampleSettings
from trainer.features.experts import Experts, ExpertSettings
from trainer.features.gap import GapCheck, GapSettings
from trainer.features.gate import Gate, GateSettings
from trainer.features.images import Images
from trainer.features.imported import Imported
from trainer.features.lineage import Lineage
from trainer.features.memory import MemorySettings, SavingAgent
from trainer.features.optimizers import OptimizerSettings, check_optimizer, make_optimizer
from trainer.features.pace import Pace, PaceSettings
from trainer.features.policies import Bases, Quotas, QuotaSettings
from trainer.features.ratings import ByHead, RatingSettings, check_ratings
from trainer.features.recorders import RecorderSettings, check_packages, recorders_of
from trainer.features.reference import references_of
from trainer.features.replay import ReplayClaims, ReplaySettings
from trainer.features.rewinds import Refusals, Rewinds, RewindSettings
from trainer.features.sentinels import Sentinels, SentinelSettings
from trainer.features.sleep import EngineSleep, SleepSettings
from trainer.features.stalled import Stalled, StalledSettings
from trainer.features.supports import Supports
from trainer.features.transfers import Transfers, TransferSettings
from trainer.settings import TrainerSettings
from trainer.train import Features

FEATURES = Features(
    terms=(Supports, Images, Experts),
    heads=(references_of, critics_of),
    optimizer=make_optimizer,
    holds=(Stalled, Consent, Refusals, Sentinels, Quotas, Rewinds, KeptSessions, Lineage, Pace),
    beside=(GapCheck, Bases, ByHead, Imported, Gate, ExampleGate, Estimates, Transfers, EngineSleep, Evaluation),
    claims=(ReplayClaims,),
    recorders=recorders_of,
    checks=(check_divisible, check_optimizer, check_packages, check_ratings),
    agent=SavingAgent,
    place=place_of,
    leave=leave_world,
)


class Settings(
    DevicesSettings,
    OptimizerSettings,
    MemorySettings,
    ReplaySettings,
    RatingSettings,
    ExpertSettings,
    TransferSettings,
    SleepSettings,
    EvaluationSettings,
    RecorderSettings,
    GapSettings,
    GateSettings,
    ExampleSettings,
    EstimateSettings,
    SentinelSettings,
    QuotaSettings,
    RewindSettings,
    PaceSettings,
    StalledSettings,
    TrainerSettings,
):
    """The settings of one trainer process with all of its features."""
