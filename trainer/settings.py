"""Every setting of the trainer: `[trainer]` of `turnwise.toml`, `TURNWISE_TRAINER_*`, the flags of `turnwise train`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from trainer.learning.advantages import AdvantageRule, Estimator, GroupBy, Singleton
from trainer.learning.batch import Aggregation, Packing
from trainer.learning.losses import Algorithm, Estimate, LossRule
from trainer.policy.model import PolicySpec
from trainer.source import SourceRule
from turnwise.settings import Settings
from turnwise.store.claims import LONGEST_LEASE_SECONDS
from turnwise.types import PolicyKind


class TrainerSettings(Settings):
    """What a trainer is told before it starts."""

    database: SecretStr = SecretStr("sqlite:///turnwise.db")
    """URL of the ledger. Secret, because it may hold a password."""
    model: str
    """Directory or Hub name of the base model: what policy version 0 is, for engines too."""
    policies_dir: Path = Path("policies")
    """Where versions are written; engines must see the same path."""
    trainer_id: str = "trainer"
    """Name under which groups are claimed. A process that restarts under it takes up what it held: one process each."""
    workflow: Literal["on_policy", "off_policy"] = "on_policy"
    seed: int = 0

    kind: PolicyKind = PolicyKind.FULL
    """`full` trains and publishes all weights, `lora` an adapter."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the computation; weights and optimizer stay in float32."""
    gradient_checkpointing: bool = False
    compile: bool = False
    """Compile the forward pass: pays where a run is long."""
    multi_devices: bool = False
    """Shard over all processes that `torchrun` started."""
    num_threads: int | None = Field(default=None, ge=1)
    """Of torch on the CPU; None leaves torch's own choice. Leave cores to an engine beside it: threads that wait
    for each other on a busy core cost many times the work. Another number changes the last bits of the weights."""
    lora_rank: int = Field(default=16, ge=1)
    lora_alpha: int = Field(default=32, ge=1)

    algorithm: Algorithm = "ppo"
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.28, ge=0)
    """Above `clip_low` it is DAPO's clip-higher. GSPO wants both near 4e-4, CISPO and masked_is wider ones."""
    tis_cap: float | None = Field(default=None, gt=0)
    """Cap of truncated importance sampling; None leaves it off."""
    proximal: bool = False
    """Take ratios to the weights at the start of a batch instead of the behaviour's: one more forward pass a batch."""
    entropy_coef: float = 0.0
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the base model; above 0 it is held in memory beside the policy, or is LoRA's own base."""
    kl_estimate: Estimate = "k3"
    dpo_beta: float = Field(default=0.1, gt=0)
    sft_min_reward: float = 1.0
    """Behaviour cloning takes sessions with at least this reward."""

    estimator: Estimator = "grpo"
    group_by: GroupBy = "auto"
    """`session` compares session rewards, `step` returns at the same step; `auto` asks each session's credit."""
    ddof: Literal[0, 1] = 1
    singleton: Singleton = "zero"
    """What a group of one is worth: nothing, or its own reward."""
    reward_bonus_coeff: float = 0.0
    """Bonus for a step that is better than the one before it."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`, `session_mean` or `session_sum`."""
    session_tokens: int = Field(default=1024, ge=1)
    """The constant that `session_sum` divides by."""

    learning_rate: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Keeps tiny gradients from becoming full steps; larger is calmer."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, over `total_batches` batches; `constant` needs no end."""
    num_warmup_updates: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises."""

    groups_per_batch: int = Field(default=32, ge=1)
    num_minibatches: int = Field(default=4, ge=1)
    """Optimizer steps a pass over a batch."""
    reuse_epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    row_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one packed row, the memory bound; None: 512 on a CPU, where attention over more costs, else 8192."""
    packing: Packing = "forest"
    """`forest` packs and shares prefixes; `chain` gives each chain a row, as models with sliding windows need it."""
    total_batches: int | None = Field(default=None, ge=1)
    """Batches to train, those before a restart included; None goes on until it is stopped."""
    max_staleness: int = Field(default=2, ge=0)
    """Groups with an older turn than this many versions are dropped; 0 is strictly on policy."""
    max_logprob_gap: float = Field(default=0.1, gt=0)
    """Mean |trainer − engine| over on-policy tokens, nats, above which a batch is refused."""

    wait_seconds: float | None = 60.0
    """How long to wait for a whole batch once a group is ready; then a smaller one is taken. None waits on."""
    lease_seconds: float = Field(default=60.0, gt=0, le=LONGEST_LEASE_SECONDS)
    poll_seconds: float = Field(default=0.5, gt=0)
    stalled_seconds: float | None = None
    """A group in which nothing happened for so long is closed; None leaves it open."""
    stalled_policy: Literal["train", "drop"] = "train"

    buffer_groups: int = Field(default=512, ge=1)
    """Off policy: groups that the replay buffer holds; the oldest leave it."""
    buffer_min_groups: int = Field(default=32, ge=1)
    """Off policy: groups that must be there before the first update."""
    buffer_sampling: Literal["uniform", "recency", "priority"] = "uniform"

    keep_versions: int = Field(default=3, ge=1)
    """Versions that stay on disk besides the active, the pinned and the newest one."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Batches between evaluations; None never evaluates."""
    evaluation_command: tuple[str, ...] = ()
    """Plays held-out tasks through the proxy, in sessions of split `eval`; empty only reads what others played."""
    evaluation_seconds: float = Field(default=600.0, gt=0)

    log_path: Path | None = None
    """JSON Lines, one a batch and one an optimizer step; None: `trainer.jsonl` in `policies_dir`."""
    progress: bool = True
    """One line on the terminal that says how it goes."""
    tensorboard_dir: Path | None = None
    wandb_project: str | None = None

    def policy_spec(self) -> PolicySpec:
        """Return what the policy is made from."""
        return PolicySpec(
            model=self.model,
            kind=self.kind,
            device=self.device,
            dtype=self.dtype,
            gradient_checkpointing=self.gradient_checkpointing,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
        )

    def advantage_rule(self) -> AdvantageRule:
        """Return how rewards become advantages."""
        return AdvantageRule(estimator=self.estimator, group_by=self.group_by, ddof=self.ddof, singleton=self.singleton)

    def loss_rule(self) -> LossRule:
        """Return the loss and its constants."""
        return LossRule(
            algorithm=self.algorithm,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            tis_cap=self.tis_cap,
            entropy_coef=self.entropy_coef,
            kl_coef=self.kl_coef,
            kl_estimate=self.kl_estimate,
            dpo_beta=self.dpo_beta,
        )

    def source_rule(self) -> SourceRule:
        """Return when a batch is there."""
        return SourceRule(
            trainer_id=self.trainer_id,
            groups_per_batch=self.groups_per_batch,
            wait_seconds=self.wait_seconds,
            lease_seconds=self.lease_seconds,
            poll_seconds=self.poll_seconds,
            stalled_seconds=self.stalled_seconds,
            stalled_policy=self.stalled_policy,
            reward_bonus_coeff=self.reward_bonus_coeff,
        )
