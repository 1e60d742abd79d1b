"""Which share of the sessions a new version is tried on, and which share stays on an older one; both are off."""

from pydantic import Field

from turnwise.settings import Settings


class ArmSettings(Settings):
    """Canaries and the hold-out."""

    canary_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of new sessions that sample with a new version before all do; 0 serves it to all at once. Whole weights
    need a second engine for a trial, adapters do not."""
    canary_min_sessions: int = Field(default=20, ge=2)
    """Finished sessions that each arm needs before the canary can be judged."""
    canary_max_sessions: int = Field(default=400, ge=2)
    """Finished sessions of the canary after which its mean alone decides."""
    canary_reward_drop: float = Field(default=0.1, ge=0)
    """How far the canary's mean session reward may lie below the control's."""
    canary_skips_estimated: bool = False
    """Serve a version to all without a trial if its trainer's estimate says that its mean reward certainly falls by no
    more than `canary_reward_drop`, from sessions that the served version sampled."""
    holdout_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the new sessions without a group that stays on an older version, in split `eval`, so that what later
    versions gain is measured; these sessions are not trained. 0 keeps none. Whole weights need an engine of their own
    for it. Once the gain is certain, the version that is served then becomes the next hold-out."""
