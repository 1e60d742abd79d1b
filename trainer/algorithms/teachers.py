"""Asking teachers for the logprobs of a batch's tokens, by `prompt_logprobs`, or for replies, over HTTP from any vLLM.

One request carries the tokens of one chain. A teacher that is not reachable or overloaded is asked again for
`RETRY_SECONDS`; what no teacher could score is counted by reason and gets no advantage from a teacher.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from trainer.batch.batch import Batch, Reals
from trainer.batch.forest import Indices
from turnwise.types import Json, TokenIds

log = logging.getLogger(__name__)

CONCURRENCY = 8
"""Chains that are sent at once."""
TIMEOUT_SECONDS = 60.0
RETRY_SECONDS = 600.0
"""How long a chain is sent again to a teacher that is not reachable or overloaded, before it counts as unscored. The
chains of a batch together wait no longer for a teacher that answers none of them."""
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 10.0
TOO_MANY_REQUESTS = 429
SERVER_ERRORS = 500


class Teacher(BaseModel):
    """A vLLM endpoint whose model rates the student's tokens. Its tokens must have the same ids."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: str
    """Address of its API, with `/v1`."""
    model: str
    """Name under which it is served."""
    key: SecretStr | None = None
    """API key; None sends none."""
    tasks: str = "*"
    """Pattern of the task ids that it rates, as in a shell."""
    weight: float = Field(default=1.0, gt=0)
    """Weight among the teachers of the same task."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """What the teachers said about a batch."""

    logprobs: Reals
    """Logprob of each trained token, the weighted mean over its teachers; 0 where none scored it. [M]"""
    is_scored: npt.NDArray[np.bool_]
    """[M]"""
    unscored: dict[str, int]
    """Requests without a usable answer, by reason, and chains without a teacher."""


class Unscored(Exception):
    """A teacher gave no usable answer."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Teachers:
    """The teachers of a run."""

    def __init__(self, teachers: Sequence[Teacher]) -> None:
        self._teachers = teachers
        self._http = httpx2.Client(timeout=TIMEOUT_SECONDS)
        self._failing_since: dict[Teacher, float] = {}
        """When each teacher first gave no answer in the current batch; teachers that answer are absent."""

    def score(self, batch: Batch, members: Sequence[int]) -> TeacherScores:
        self._failing_since.clear()
        trained = [member for member in members if len(batch.tokens_of[member])]
        asked = [(member, teacher) for member in trained for teacher in self._teachers_of(batch, member)]
        unscored = Counter("without_teacher" for member in trained if not self._teachers_of(batch, member))
        sums, weights = np.zeros(len(batch.table)), np.zeros(len(batch.table))
        with ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="teacher") as pool:
            answers = pool.map(lambda one: self._score_chain(batch, *one), asked)
            for (member, teacher), answer in zip(asked, answers, strict=True):
                if isinstance(answer, Unscored):
                    unscored[answer.reason] += 1
                    log.warning("chain of session %s: %s", batch.experiences[member].session_id, answer)
                    continue
                tokens = batch.tokens_of[member]
                sums[tokens] += teacher.weight * answer
                weights[tokens] += teacher.weight
        is_scored = weights > 0
        logprobs = np.divide(sums, weights, out=np.zeros_like(sums), where=is_scored)
        return TeacherScores(logprobs=logprobs.astype(np.float32), is_scored=is_scored, unscored=dict(unscored))

    def replies(self, prompts: Sequence[TokenIds], max_tokens: int) -> tuple[list[TokenIds], dict[str, int]]:
        """Return what the first teacher samples after each prompt, and why others got nothing, by reason.

        A prompt without a whole reply of at most `max_tokens` gets no tokens.
        """
        self._failing_since.clear()
        unscored: Counter[str] = Counter()
        replies = []
        with ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="teacher") as pool:
            for answer in pool.map(lambda prompt: self._reply(prompt, max_tokens), prompts):
                if isinstance(answer, Unscored):
                    unscored[answer.reason] += 1
                    log.warning("a correction: %s", answer)
                replies.append(np.empty(0, np.int32) if isinstance(answer, Unscored) else answer)
        return replies, dict(unscored)

    def close(self) -> None:
        self._http.close()

    def _teachers_of(self, batch: Batch, member: int) -> list[Teacher]:
        task = batch.experiences[member].task_id
        return [teacher for teacher in self._teachers if fnmatch.fnmatchcase(task, teacher.tasks)]

    def _score_chain(self, batch: Batch, member: int, teacher: Teacher) -> np.ndarray | Unscored:
        places = batch.table.place[batch.tokens_of[member]]
        if batch.experiences[member].needed_terms:
            return Unscored("images", "it has images, and a teacher gets token ids alone")
        tokens = batch.experiences[member].tokens[: places[-1] + 1]
        body = {"prompt": tokens.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        return self._read(teacher, body, lambda answer: read_logprobs(answer, tokens, places))

    def _reply(self, prompt: TokenIds, max_tokens: int) -> TokenIds | Unscored:
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        body = {"prompt": prompt.tolist(), "max_tokens": max_tokens, "return_token_ids": True, **sampling}
        return self._read(self._teachers[0], body, read_reply)

    def _read(self, teacher: Teacher, body: Json, read: Callable[[Json], np.ndarray]) -> np.ndarray | Unscored:
        try:
            return read(self._ask(teacher, body))
        except Unscored as error:
            return error

    def _ask(self, teacher: Teacher, body: Json) -> Json:
        """Return a teacher's answer; ask again while it is not reachable or overloaded."""
        started, pause = time.monotonic(), FIRST_PAUSE
        while True:
            try:
                answer = self._post(teacher, body)
            except Unscored as error:
                if error.reason != "unreachable":
                    raise
                since = min(started, self._failing_since.setdefault(teacher, started))
                if time.monotonic() + pause - since > RETRY_SECONDS:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self._failing_since.pop(teacher, None)
                return answer

    def _post(self, teacher: Teacher, body: Json) -> Json:
        headers = {} if teacher.key is None else {"Authorization": f"Bearer {teacher.key.get_secret_value()}"}
        url, named = f"{teacher.url.rstrip('/')}/completions", {"model": teacher.model, **body}
        try:
            reply = self._http.post(url, json=named, headers=headers)
        except httpx2.HTTPError as error:
            raise Unscored("unreachable", f"teacher {teacher.url} cannot be reached: {error}") from error
        if reply.status_code == TOO_MANY_REQUESTS or reply.status_code >= SERVER_ERRORS:
            raise Unscored("unreachable", f"teacher {teacher.url} answered {reply.status_code}: {reply.text[:200]}")
        if reply.is_error:
            raise Unscored("refused", f"teacher {teacher.url} refused it with {reply.status_code}: {reply.text[:200]}")
        try:
            answer: Json = reply.json()
        except ValueError as error:
            raise Unscored("unreadable", f"teacher {teacher.url} answered no JSON: {reply.text[:200]}") from error
        return answer


def read_logprobs(answer: Json, tokens: TokenIds, places: Indices) -> np.ndarray:
    """Return the logprobs of the tokens at these places from vLLM's `prompt_logprobs`.

    Raises:
        Unscored: They are missing, not numbers, or of other tokens.
    """
    try:
        shown: list[dict[str, dict[str, Any]] | None] = answer["choices"][0]["prompt_logprobs"]
        found = [(shown[place] or {})[str(tokens[place])]["logprob"] for place in places]
        logprobs = np.array(found, np.float64)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unscored(
            "unreadable",
            f"its answer has no prompt_logprobs of these token ids ({error!r}): check that it is vLLM, and "
            "that the teacher has the student's tokenizer",
        ) from error
    if len(shown) != len(tokens) or not np.isfinite(logprobs).all():
        raise Unscored("unreadable", "its prompt_logprobs are not one finite number a token")
    return logprobs


def read_reply(answer: Json) -> TokenIds:
    """Return the tokens of a whole reply from vLLM's answer with `return_token_ids`.

    Raises:
        Unscored: They are missing, or the reply was cut.
    """
    try:
        choice = answer["choices"][0]
        token_ids = np.array(choice["token_ids"], np.int32)
        is_whole = choice["finish_reason"] == "stop" and len(token_ids) > 0
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unscored(
            "unreadable",
            f"its answer has no token_ids ({error!r}): check that it is a vLLM that knows return_token_ids",
        ) from error
    if not is_whole:
        raise Unscored("too_long", f"its reply of {len(token_ids)} tokens was cut; set a larger max_reply_tokens")
    return token_ids
