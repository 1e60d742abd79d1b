"""`turnwise reward`: measures how far a source agrees with known outcomes, lets it decide, and posts each reward once.

A session that has its reward has a line in a state file. Between the post and the line a kill can fall, so every post
also has an idempotency key made of the source, the rewards' name and the session: the proxy takes it once.

With a check set of known outcomes, a source has to agree with them before its rewards are posted. Two sessions of
different outcomes are a pair. The source agrees if it gives the better one the higher reward; an equal reward counts
half. The agreement is the mean over all pairs; for outcomes 0 and 1 it is the area under the ROC curve, and 0.5 is
chance. A source that compares groups is checked on the pairs within a group.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.client import AsyncClient
from turnwise.errors import (
    MALFORMED,
    Conflict,
    GraderFailed,
    InvalidRequest,
    NotFound,
    ProxyUnavailable,
    SettingsError,
    TooLarge,
)
from turnwise.files import append_lines, read_objects
from turnwise.rewards.grader import Grade, document, finite
from turnwise.rewards.judge import SOURCE as JUDGE
from turnwise.rewards.settings import RewardSettings, check
from turnwise.rewards.sources import Source, make_source
from turnwise.types import Json

POLL_SECONDS = 2.0
"""How often a watching process looks for newly ended sessions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of a source with a check set."""

    num_sessions: int
    num_pairs: int
    value: float | None

    def line(self) -> str:
        if self.value is None:
            return f"no two of {self.num_sessions} checked sessions have different known outcomes and a reward each"
        return f"agrees with {self.value:.0%} of {self.num_pairs} pairs of {self.num_sessions} checked sessions"


def read_outcomes(path: Path) -> dict[str, float]:
    """Return the known outcome of each session: lines of JSON with `session_id` and `reward`."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--check {str(path)!r} cannot be read: {error}; give a JSON Lines file") from error
    found: dict[str, float] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                outcome = json.loads(line)
                found[str(outcome["session_id"])] = finite(float(outcome["reward"]))
            except (GraderFailed, *MALFORMED) as error:
                raise SettingsError(
                    f'{path}:{number} is no known outcome; write {{"session_id": "…", "reward": 1}}'
                ) from error
    return found


def units_of(documents: Sequence[Json], *, relative: bool) -> list[list[Json]]:
    """Return what is decided on together: single sessions, or for a relative source the sessions of each group."""
    if not relative:
        return [[each] for each in documents]
    groups: dict[str, list[Json]] = defaultdict(list)
    for each in documents:
        groups[each["session"]["group_id"] or each["session"]["session_id"]].append(each)
    return list(groups.values())


def session_rewards(unit: Sequence[Json], rewards: Iterable[Grade]) -> dict[str, float]:
    """Return the total reward of each session of a unit; sessions without a reward are left out."""
    totals: dict[str, float] = defaultdict(float)
    for reward in rewards:
        totals[reward.session_id or unit[0]["session"]["session_id"]] += reward.value
    return dict(totals)


def agreement(outcomes: Mapping[str, float], units: Iterable[Mapping[str, float]]) -> Agreement:
    """Return the agreement over all pairs of each unit.

    `outcomes` are the known outcomes by session, `units` the rewards that the source gave; sessions of different units
    are not compared.
    """
    num_sessions, scores = 0, list[float]()
    for rewards in units:
        num_sessions += len(rewards)
        for first, second in itertools.combinations(rewards, 2):
            known, given = outcomes[first] - outcomes[second], rewards[first] - rewards[second]
            if known:
                scores.append(0.5 if not given else float((known > 0) == (given > 0)))
    return Agreement(num_sessions, len(scores), sum(scores) / len(scores) if scores else None)


def require(found: Agreement, minimum: float) -> None:
    """Check that a source may be trusted.

    Raises:
        GraderFailed: its agreement is below the minimum, or unknown.
    """
    if found.value is None or found.value < minimum:
        raise GraderFailed(
            f"the source {found.line()}; at least {minimum:.0%} are required (--min-agreement), so no reward was "
            "posted: change the rubric or the judge, or lower the bound"
        )


READY_SECONDS = 4.0
FIRST_PAUSE_SECONDS = 0.5
POLLS_BETWEEN_FULL_SCANS = 30
"""A poll stops at the first page of sessions that all have their reward; after this many polls all pages are read."""
PAGE = 100


@dataclasses.dataclass(slots=True)
class PostingCounts:
    """Counts of what was done so far."""

    num_sessions: int = 0
    num_rewards: int = 0
    num_turns_reached: int = 0
    num_without_reward: int = 0
    num_failed: int = 0
    """Sessions that are left without a reward: all attempts failed, or the proxy does not take what was decided."""
    num_rewarded_before: int = 0
    """Sessions that are left as they are, because somebody else gave them a reward."""
    num_retries: int = 0
    value_sum: float = 0.0
    last_error: str | None = None

    def line(self) -> str:
        mean = f"mean {self.value_sum / self.num_rewards:.3f}" if self.num_rewards else "no reward yet"
        problems = f", {self.num_failed} failed" if self.num_failed else ""
        before = f", {self.num_rewarded_before} had a reward (--no-unrewarded)" if self.num_rewarded_before else ""
        return f"{self.num_sessions} sessions  {self.num_rewards} rewards  {mean}{problems}{before}"


class Poster:
    """Decides on ended sessions and posts their rewards."""

    def __init__(
        self, settings: RewardSettings, client: AsyncClient, source: Source, say: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._client = client
        self._source = source
        self._say = say
        self._places = asyncio.Semaphore(settings.parallel)
        self._path = settings.state_path()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._done = read_state(self._path)
        self._given_up: set[str] = set()
        self._rewarded: set[str] = set()
        self._num_polls = 0
        self._is_interrupted = False
        """Whether a unit of this poll ended with an error that concerns all units; no further unit is begun."""
        self.counts = PostingCounts()
        self.stopping = asyncio.Event()

    async def run(self) -> PostingCounts:
        """Go through the ended sessions; with `watch` until stopped, also while the proxy is not available.

        Raises:
            ProxyUnavailable: the proxy cannot be reached, without `watch`.
        """
        while not self.stopping.is_set():
            try:
                await self._handle_all()
            except ProxyUnavailable as error:
                if not self._settings.watch:
                    raise
                self._say(f"{self.counts.line()}, trying again: {error}")
            if not self._settings.watch or self._is_full():
                break
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self.stopping.wait()
            except TimeoutError:
                continue
        return self.counts

    async def _handle_all(self) -> None:
        self._is_interrupted = False
        units = [unit async for unit in self._units()]
        outcomes = await asyncio.gather(*(self._handle(unit) for unit in units), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def measure(self, outcomes: Mapping[str, float]) -> Agreement:
        """Let the source decide on sessions of known outcome, without posting; return its agreement.

        Raises:
            GraderFailed: it gives no verdict on one of them.
            NotFound: one of them is not stored.
        """
        documents = [await self._document(await self._client.session(session_id)) for session_id in outcomes]
        units = units_of(documents, relative=self._settings.relative)

        async def decide(unit: list[Json]) -> dict[str, float]:
            async with self._places:
                return session_rewards(unit, await self._attempt(unit))

        decided = await asyncio.gather(*(decide(unit) for unit in units))
        if not self._settings.relative:
            decided = [{name: value for unit in decided for name, value in unit.items()}]
        return agreement(outcomes, decided)

    def _is_full(self) -> bool:
        limit = self._settings.max_sessions
        return limit is not None and self.counts.num_sessions >= limit

    async def _units(self) -> AsyncIterator[list[Json]]:
        left = self._settings.max_sessions or float("inf")
        left -= self.counts.num_sessions
        groups: dict[str, list[Json]] = defaultdict(list)
        async for session in self._ended():
            if left <= 0:
                return
            if not self._settings.relative:
                left -= 1
                yield [session]
                continue
            group = groups[session["group_id"] or session["session_id"]]
            group.append(session)
            if len(group) == (session["group_size"] or 1) and left >= len(group):
                left -= len(group)
                yield group

    async def _ended(self) -> AsyncIterator[Json]:
        full_scan = self._num_polls % POLLS_BETWEEN_FULL_SCANS == 0 or self._settings.relative
        self._num_polls += 1
        filters = {"status": "ended", "split": self._settings.split, "task_id": self._settings.task_id, "limit": PAGE}
        filters |= {"train": "true"}  # what is not to be trained is not shown to a judge either
        num_known = 0
        async for session in self._client.sessions(**{key: value for key, value in filters.items() if value}):
            is_known = session["session_id"] in self._done or session["session_id"] in self._given_up
            if not is_known and self._settings.unrewarded and session["reward"] is not None:
                self._rewarded.add(session["session_id"])
                self.counts.num_rewarded_before, is_known = len(self._rewarded), True
            num_known = num_known + 1 if is_known else 0
            if num_known >= PAGE and not full_scan:
                return
            if not is_known and session["num_turns"] > 0 and session["metadata"].get("source") != JUDGE:
                yield session

    async def _handle(self, sessions: Sequence[Json]) -> None:
        async with self._places:
            if self.stopping.is_set() or self._is_interrupted:
                return
            try:
                await self._decide(sessions)
            except (Conflict, GraderFailed, InvalidRequest, NotFound, TooLarge) as error:
                # Also a turn that the source made up, or a session that was deleted meanwhile: the next start would
                # meet it again, so it must not end this process.
                self.counts.num_failed += len(sessions)
                self.counts.last_error = f"session {sessions[0]['session_id']}: {error}"
                self._given_up |= {session["session_id"] for session in sessions}
            except BaseException:
                self._is_interrupted = True
                raise
        self.counts.num_sessions += len(sessions)
        self._say(self.counts.line())

    async def _decide(self, sessions: Sequence[Json]) -> None:
        documents = [await self._document(session) for session in sessions]
        rewards = await self._attempt(documents)
        session_id = str(sessions[0]["session_id"])
        lines = [_named(reward, self._settings.name).line(session_id, self._settings.source) for reward in rewards]
        if lines:
            key = f"reward/{self._settings.source}/{self._settings.name}/{session_id}"
            self.counts.num_turns_reached += sum(await post_once(self._client, session_id, lines, key))
        else:
            self.counts.num_without_reward += len(sessions)
        self.counts.num_rewards += len(lines)
        self.counts.value_sum += sum(reward.value for reward in rewards)
        self._record([session["session_id"] for session in sessions])

    async def _attempt(self, documents: Sequence[Json]) -> list[Grade]:
        for attempt in range(1, self._settings.attempts + 1):
            try:
                async with asyncio.timeout(self._settings.timeout * max(self._settings.votes, 1) + 5.0):
                    return await self._source.decide(documents)
            except (GraderFailed, TimeoutError, *MALFORMED) as error:
                if attempt == self._settings.attempts:
                    raise GraderFailed(_reason(error)) from error
                self.counts.num_retries += 1
                await asyncio.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("an attempt returns or raises")

    async def _document(self, session: Json) -> Json:
        if session.get("train") is False:
            raise GraderFailed(f"session {session['session_id']!r} is marked `train = false` and may not be judged")
        turns = [turn async for turn in self._client.turns(session["session_id"])]
        return document(session, turns)

    def _record(self, session_ids: Sequence[str]) -> None:
        lines = (json.dumps({"session_id": session_id}) for session_id in session_ids)
        append_lines(self._path, lines, is_durable=True)
        self._done |= set(session_ids)


async def post_rewards(
    settings: RewardSettings, say: Callable[[str], None], on_start: Callable[[Poster], Any] = lambda _: None
) -> PostingCounts:
    """Decide on all ended sessions, and with `watch` on those that end later.

    Raises:
        SettingsError: the settings do not fit together, or the program or function cannot be found.
        GraderFailed: the source disagrees with the outcomes of its check set.
        ProxyUnavailable: the proxy cannot be reached.
    """
    check(settings)
    source = make_source(settings)
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    try:
        async with AsyncClient(settings.url, key, max_retries=10) as client:
            await client.wait_until_ready(READY_SECONDS)
            poster = Poster(settings, client, source, say)
            on_start(poster)
            if settings.check is not None:
                measured = await poster.measure(read_outcomes(settings.check))
                say(f"the source {measured.line()}")
                require(measured, settings.min_agreement)
            return await poster.run()
    finally:
        await source.close()


def read_state(path: Path) -> set[str]:
    return {line["session_id"] for line in read_objects(path) if "session_id" in line}


async def post_once(client: AsyncClient, session_id: str, lines: Sequence[Json], key: str) -> list[int]:
    """Post the rewards of a session under an idempotency key; return how many turns each reached.

    Where they were posted before a kill, and are decided otherwise now, the first decision stands: none is reached.

    Raises:
        Conflict: the key has another request, and the session has no reward.
    """
    try:
        return await client.rewards(lines, idempotency_key=key)
    except Conflict:
        if (await client.session(session_id))["reward"] is None:
            raise
        return []


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no verdict within the time limit"
    return str(error) if isinstance(error, GraderFailed) else f"{type(error).__name__}: {error}"


def _named(reward: Grade, name: str) -> Grade:
    return reward if reward.name is not None or name == "reward" else dataclasses.replace(reward, name=name)
