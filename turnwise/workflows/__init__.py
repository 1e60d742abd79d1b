"""Workflows of other systems over sessions of the proxy: rLLM's here, Trinity-RFT's here and in `.trinity`.

Both have a class `Workflow`: rLLM's is this package's, Trinity's is `turnwise.workflows.trinity.Workflow`. Importing
this loads numpy and an HTTP client; torch, verl and openai are loaded by what needs them.
"""

from __future__ import annotations

from turnwise.workflows.agents import BaseAgent, BaseEnv
from turnwise.workflows.engine import AgentWorkflowEngine
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
from turnwise.workflows.runner import WorkflowRunner
from turnwise.workflows.step_wise import (
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
)
from turnwise.workflows.tasks import Task
from turnwise.workflows.workflow import Workflow

__all__ = [
    "EID",
    "Action",
    "AgentWorkflowEngine",
    "AsyncRewardPropagationWorkflow",
    "AsyncStepWiseRewardWorkflow",
    "BaseAgent",
    "BaseEnv",
    "Episode",
    "Experience",
    "ModelOutput",
    "ModelWrapper",
    "RewardPropagationWorkflow",
    "RolloutEngine",
    "SessionRolloutEngine",
    "Step",
    "StepWiseRewardWorkflow",
    "Task",
    "TerminationEvent",
    "TerminationReason",
    "Trajectory",
    "Workflow",
    "WorkflowRunner",
]
