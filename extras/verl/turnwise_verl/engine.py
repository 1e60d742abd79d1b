"""`AgentWorkflowEngine` with rLLM's methods for verl; verl itself is imported when a batch is made of episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turnwise.workflows import AgentWorkflowEngine as WorkflowEngine
from turnwise.workflows import Episode
from turnwise_verl.rows import in_batch_order

if TYPE_CHECKING:
    from verl import DataProto


class AgentWorkflowEngine(WorkflowEngine):
    """Runs the tasks of verl's batches; its `config` is verl's, with `data` and `rllm`."""

    async def execute_tasks_verl(self, batch: DataProto, **kwargs: Any) -> DataProto:
        """Run the tasks of a verl batch and return its rows as a verl batch."""
        task_ids = batch.non_tensor_batch["task_ids"].tolist()
        tasks = batch.non_tensor_batch["extra_info"].tolist()
        await self.notify("wake_up")
        self.rollout_engine.validate = bool(batch.meta_info.get("validate", False))
        try:
            episodes = await self.execute_tasks(tasks, task_ids, **kwargs)
        finally:
            self.rollout_engine.validate = False
            await self.notify("sleep")
        return self.transform_results_for_verl(in_batch_order(episodes, task_ids), task_ids)

    def transform_results_for_verl(self, episodes: list[Episode], task_ids: Any) -> DataProto:
        from turnwise_verl.data_proto import to_data_proto

        return to_data_proto(episodes, list(task_ids), self.config, self._pad_token_id())

    def _pad_token_id(self) -> int:
        owners = (self.rollout_engine, getattr(self.rollout_engine, "tokenizer", None))
        return next((found for owner in owners if (found := getattr(owner, "pad_token_id", None)) is not None), 0)
