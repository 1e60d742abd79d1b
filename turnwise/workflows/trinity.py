"""Trinity-RFT's names in one place: change `trinity.common…` to this module and the workflow runs."""

from __future__ import annotations

from turnwise.workflows.experience import EID, Experience
from turnwise.workflows.model import ModelWrapper
from turnwise.workflows.step_wise import (
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
)
from turnwise.workflows.tasks import FormatConfig, GenerationConfig, Status, Task, WorkflowRunner
from turnwise.workflows.tasks import TaskWorkflow as Workflow

__all__ = [
    "EID",
    "AsyncRewardPropagationWorkflow",
    "AsyncStepWiseRewardWorkflow",
    "Experience",
    "FormatConfig",
    "GenerationConfig",
    "ModelWrapper",
    "RewardPropagationWorkflow",
    "Status",
    "StepWiseRewardWorkflow",
    "Task",
    "Workflow",
    "WorkflowRunner",
]
