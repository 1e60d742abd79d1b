"""rLLM's `AgentWorkflowEngine`: run many tasks concurrently over a pool of workflow objects, and retry failed runs.

A run is a session of the proxy. The engine creates it and writes the end and the rewards of the run to the ledger, so a
trainer needs no data from this process. The returned episodes contain the same data for callers that train in this
process.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import inspect
import logging
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from turnwise.errors import InvalidRequest, RolloutFailed
from turnwise.types import Json
from turnwise.workflows.episodes import Episode, TerminationReason
from turnwise.workflows.rollout import RunIdentity
from turnwise.workflows.workflow import Workflow

logger = logging.getLogger(__name__)


class AgentWorkflowEngine:
    """Runs tasks with a workflow class, `n_parallel_tasks` at a time."""

    def __init__(
        self,
        workflow_cls: type[Workflow],
        workflow_args: Json | None,
        rollout_engine: Any,
        config: Any = None,
        n_parallel_tasks: int = 128,
        retry_limit: int = 3,
        raise_on_error: bool = True,
        **kwargs: Any,
    ) -> None:
        """Store the parts of a run.

        The workflow objects get `workflow_args`, engine and executor. The engine samples replies: any object with
        rLLM's `get_model_response`, whose methods `begin_run` and `end_run` are called where it has them. Of `config`
        only `rllm.stepwise_advantage.enable` is read. `n_parallel_tasks` runs, and as many threads for their blocking
        calls, are active at a time. A run that ends in an error has `retry_limit` attempts; with `raise_on_error` the
        last one ends the batch. Other arguments are for subclasses.
        """
        self.workflow_cls = workflow_cls
        self.workflow_args = workflow_args or {}
        self.rollout_engine = rollout_engine
        self.config = config
        self.n_parallel_tasks = n_parallel_tasks
        self.retry_limit = retry_limit
        self.raise_on_error = raise_on_error
        self.kwargs = kwargs
        self.executor: ThreadPoolExecutor | None = ThreadPoolExecutor(max_workers=n_parallel_tasks)
        self.workflow_queue: asyncio.Queue[Workflow] | None = None

    async def initialize_pool(self) -> None:
        if self.workflow_queue is not None:
            return
        queue: asyncio.Queue[Workflow] = asyncio.Queue(maxsize=self.n_parallel_tasks)
        for _ in range(self.n_parallel_tasks):
            arguments = {"rollout_engine": self.rollout_engine, "executor": self.executor, **self.workflow_args}
            workflow = self.workflow_cls(**arguments)
            if not workflow.is_multithread_safe():
                name = self.workflow_cls.__name__
                raise InvalidRequest(f"{name!r} holds an environment that is not multithread-safe: make it so")
            queue.put_nowait(workflow)
        self.workflow_queue = queue

    async def process_task_with_retry(
        self, task: Json, task_id: str, rollout_idx: int, **kwargs: Any
    ) -> tuple[str, int, Episode]:
        return await self._process(task, self._identity(task_id, rollout_idx), kwargs)

    async def execute_tasks(self, tasks: list[Json], task_ids: list[str] | None = None, **kwargs: Any) -> list[Episode]:
        """Run all tasks; equal ids are rollouts of one task and form one group in the ledger.

        Returns:
            Episodes in the order in which their task ids first appear; episodes of one task in order of completion.
        """
        await self.initialize_pool()
        ids = [str(uuid.uuid4()) for _ in tasks] if task_ids is None else list(task_ids)
        pairs = list(zip(tasks, self._identities(ids), strict=True))
        rollouts = [asyncio.ensure_future(self._process(task, run, kwargs)) for task, run in pairs]
        by_task: dict[str, list[Episode]] = {task_id: [] for task_id in ids}
        num_failed = 0
        try:
            with click.progressbar(
                asyncio.as_completed(rollouts),
                length=len(rollouts),
                label="rollouts",
                show_pos=True,
                item_show_func=lambda _: f"{num_failed} failed",
                file=sys.stderr,
                hidden=not sys.stderr.isatty(),
            ) as all_finished:
                for finished in all_finished:
                    task_id, _, episode = await finished
                    by_task[task_id].append(episode)
                    num_failed += _is_error(episode)
        finally:
            # All runs stop after the batch has failed.
            for rollout in rollouts:
                rollout.cancel()
            await asyncio.gather(*rollouts, return_exceptions=True)
        return [episode for episodes in by_task.values() for episode in episodes]

    def shutdown(self) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=True)
            self.executor = None

    async def _process(self, task: Json, run: RunIdentity, kwargs: Json) -> tuple[str, int, Episode]:
        await self.initialize_pool()
        assert self.workflow_queue is not None
        workflow = await self.workflow_queue.get()
        try:
            for attempt in range(1, self.retry_limit + 1):
                await self.notify("begin_run", run)
                episode = await workflow.run_with_termination_handling(task=task, uid=run.uid, **kwargs)
                again = _is_error(episode) and attempt < self.retry_limit
                await self.notify("end_run", episode, retried=again)
                if not again:
                    break
                logger.warning("[%s] attempt %d of %d failed, trying again", run.uid, attempt, self.retry_limit)
        finally:
            self.workflow_queue.put_nowait(workflow)
        if _is_error(episode) and self.raise_on_error:
            cause = (episode.info.get("error") or {}).get("error_message")
            raise RolloutFailed(f"[{run.uid}] failed on all {self.retry_limit} attempts, at last with {cause!r}")
        return run.task_id, run.rollout_idx, episode

    async def notify(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the rollout engine, which may have none of this name."""
        function = getattr(self.rollout_engine, method, None)
        if function is None:
            return
        result = function(*args, **kwargs)
        if inspect.isawaitable(result):
            await result

    def _identities(self, task_ids: list[str]) -> list[RunIdentity]:
        batch = uuid.uuid4().hex[:8]
        sizes = collections.Counter(task_ids)
        seen: collections.Counter[str] = collections.Counter()
        runs = []
        for task_id in task_ids:
            run = self._identity(task_id, seen[task_id])
            runs.append(dataclasses.replace(run, group_id=f"{task_id}@{batch}", group_size=sizes[task_id]))
            seen[task_id] += 1
        return runs

    def _identity(self, task_id: str, rollout_idx: int) -> RunIdentity:
        step_wise = self.config is not None and self.config.rllm.stepwise_advantage.enable
        return RunIdentity(task_id=task_id, rollout_idx=rollout_idx, credit="step_wise" if step_wise else "propagate")


def _is_error(episode: Episode | None) -> bool:
    return episode is not None and episode.termination_reason is TerminationReason.ERROR
