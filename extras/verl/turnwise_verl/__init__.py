"""rLLM's engine over batches of verl: tasks come from a `DataProto`, and the captured tokens are a `DataProto`."""

from turnwise_verl.engine import AgentWorkflowEngine

__all__ = ["AgentWorkflowEngine"]
