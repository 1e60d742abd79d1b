"""Stored logprobs against those that an engine gives now for the same tokens under the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

from turnwise.engine_routes import ADDRESS_HINT, read_models
from turnwise.errors import BadCheckpoint, EngineUnavailable
from turnwise.features.verify.known_tokens import (
    NOT_REPEATABLE,
    POSITIONS_AT_ONCE,
    logprobs_request,
    read_logprobs,
)
from turnwise.features.verify.records import Verification
from turnwise.image_urls import image_digests
from turnwise.settings import mask_credentials
from turnwise.store.turns import TurnView
from turnwise.types import Json
from turnwise.version_directory import MANIFEST, read_json

TIMEOUT_SECONDS = 300.0


class LogprobChecker:
    """Recomputes the logprobs of turns on one engine.

    `tolerance` is the largest difference, in nats, that is no mismatch. Turns are checked whose policy version is at
    most `version_distance` from the engine's.

    Raises:
        EngineUnavailable: the engine does not answer.
    """

    def __init__(self, engine_url: str, *, tolerance: float, version_distance: int = 0, **options: Any) -> None:
        self._http = httpx2.Client(base_url=engine_url.rstrip("/"), timeout=TIMEOUT_SECONDS, **options)
        self._url = mask_credentials(engine_url)
        self._tolerance = tolerance
        self._version_distance = version_distance
        (model, path), *_ = read_models(self._url, self._ask("GET", "/v1/models"))
        self.model = model
        self.version = self._served_version(path)
        """Policy version of the engine's weights; 0 for a model that is no published version."""

    def close(self) -> None:
        self._http.close()

    def check(self, view: TurnView, place: str, report: Verification) -> None:
        """Compare a trainable turn's logprobs with those that the engine gives now.

        Raises:
            EngineUnavailable: the engine does not answer, or refuses the request.
        """
        turn = view.turn
        if reason := self._why_not(view):
            report.not_checked[reason] += 1
            return
        tokens = [*view.prompt_token_ids.tolist(), *turn.token_ids.tolist()]
        for start in range(turn.prompt_length, len(tokens), POSITIONS_AT_ONCE):
            positions = range(start, min(start + POSITIONS_AT_ONCE, len(tokens)))
            body = logprobs_request(self.model, tokens, positions, turn.sampling)
            now = read_logprobs(self._ask("POST", "/v1/completions", body), tokens, positions)
            for position, logprob in zip(positions, now, strict=True):
                index = position - turn.prompt_length
                stored = float(turn.logprobs[index])
                report.compare_logprobs(
                    stored, logprob, self._tolerance, f"{place} logprobs[{index}]", "the engine gives"
                )
        report.checked["turns with logprobs recomputed"] += 1
        if turn.policy_version_first != self.version:
            report.checked["of these under another version"] += 1

    def _why_not(self, view: TurnView) -> str | None:
        turn = view.turn
        if image_digests(view.messages):
            return "with images, which the engine's route for tokens does not take"
        if turn.policy_version_first != turn.policy_version_last:
            return "sampled under two versions"
        if abs(turn.policy_version_first - self.version) > self._version_distance:
            return f"sampled under version {turn.policy_version_first}, the engine serves {self.version}"
        if any(turn.sampling.get(field) for field in NOT_REPEATABLE):
            return "sampled with a constraint that depends on earlier tokens"
        return None

    def _served_version(self, directory: str) -> int:
        """Return the version that a proxy has loaded, else that of the directory that the engine was started with."""
        try:
            label = str(self._ask("GET", "/weight_info").get("weight_version"))
        except EngineUnavailable:
            label = ""
        if label.isdigit():
            return int(label)
        try:
            return int(read_json(Path(directory, MANIFEST))["version"])
        except (BadCheckpoint, KeyError):  # another machine's directory, or no version's
            return 0

    def _ask(self, method: str, path: str, body: Json | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise EngineUnavailable(
                f"the engine at {self._url} cannot be reached ({type(error).__name__}: {error}); check the URL"
            ) from error
        if response.status_code != 200:
            raise EngineUnavailable(
                f"the engine at {self._url} answered {response.status_code} to {method} {path}: {response.text:.300}"
            )
        try:
            return response.json()
        except ValueError as error:
            raise EngineUnavailable(
                f"the server at {self._url} answers {method} {path} without JSON; {ADDRESS_HINT}"
            ) from error
