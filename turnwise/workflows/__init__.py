"""Workflow classes of rLLM and Trinity-RFT over sessions of the proxy.

Both systems have a class `Workflow`: this package exports rLLM's; Trinity's is `turnwise.workflows.trinity.Workflow`.
Importing this package loads numpy and an HTTP client; openai is loaded when it is first used.
"""

from __future__ import annotations

from turnwise.workflows.engine import AgentWorkflowEngine
from turnwise.workflows.environment_workflows import CumulativeWorkflow, MultiTurnWorkflow, SingleTurnWorkflow
from turnwise.workflows.episodes import (
    Action,
    Episode,
    ModelOutput,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
)
from turnwise.workflows.experience import EID, Experience
from turnwise.workflows.model import ModelWrapper
from turnwise.workflows.rollout import RolloutEngine, SessionRolloutEngine
from turnwise.workflows.step_wise import (
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
)
from turnwise.workflows.tasks import Task, WorkflowRunner
from turnwise.workflows.workflow import BaseAgent, BaseEnv, Workflow

__all__ = [
    "EID",
    "Action",
    "AgentWorkflowEngine",
    "AsyncRewardPropagationWorkflow",
    "AsyncStepWiseRewardWorkflow",
    "BaseAgent",
    "BaseEnv",
    "CumulativeWorkflow",
    "Episode",
    "Experience",
    "ModelOutput",
    "ModelWrapper",
    "MultiTurnWorkflow",
    "RewardPropagationWorkflow",
    "RolloutEngine",
    "SessionRolloutEngine",
    "SingleTurnWorkflow",
    "Step",
    "StepWiseRewardWorkflow",
    "Task",
    "TerminationEvent",
    "TerminationReason",
    "Trajectory",
    "Workflow",
    "WorkflowRunner",
]
