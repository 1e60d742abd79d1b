"""Scores that people gave in Langfuse as feedback on the turns that were sent there.

`turnwise send-traces` sends sessions to Langfuse as traces, whose ids follow from session and turn. What annotators say
there stays there, so this command reads the scores over Langfuse's API and posts those of such traces.

    LANGFUSE_KEYS=pk-…:sk-… python -m turnwise_formats.langfuse_scores --langfuse https://cloud.langfuse.com --every 30

What was posted is read from the proxy: the command has no state, and a second pass posts nothing twice. A score that
was deleted there is taken back here, while its trace is still there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import click
import httpx2

from turnwise.client import Client
from turnwise.client.connection import DEFAULT_BASE_URL
from turnwise.client.passes import run_passes
from turnwise.client.wire import FeedbackKind
from turnwise.errors import NotFound
from turnwise.types import Json
from turnwise_formats.otlp import span_id_of, trace_id_of

log = logging.getLogger(__name__)
SOURCE = "langfuse"
TIMEOUT_SECONDS = 60.0
PAGE = 100
"""Scores of a page, the most that Langfuse gives."""
ABOUT = ("trace", "observation")
"""Kinds of what a score is about that are sessions and turns here; a session of Langfuse is a group."""
KINDS: dict[str, FeedbackKind] = {
    "BOOLEAN": "boolean",
    "NUMERIC": "float",
    "TEXT": "comment",
    "CATEGORICAL": "comment",
    "CORRECTION": "demonstration",
}
"""Kind of feedback by a score's data type."""


class Langfuse:
    """The scores and traces of a Langfuse project, from version 3.179 on."""

    def __init__(self, url: str, keys: str) -> None:
        """`keys` is PUBLIC_KEY:SECRET_KEY."""
        public, _, secret = keys.partition(":")
        self._http = httpx2.Client(base_url=url.rstrip("/"), auth=(public, secret), timeout=TIMEOUT_SECONDS)

    def scores(self, source: str) -> Iterator[Json]:
        """Yield the scores of a source, such as ANNOTATION, with what they are about."""
        asked: dict[str, str | int] = {"limit": PAGE, "source": source, "fields": "subject"}
        while True:
            page = self._get("/api/public/v3/scores", asked)
            yield from page["data"]
            if not page["meta"].get("cursor"):
                return
            asked["cursor"] = page["meta"]["cursor"]

    def session_of(self, trace_id: str) -> Json | None:
        """Return tenant and id of a trace's session; None for a trace that `turnwise send-traces` did not send."""
        try:
            metadata = self._get(f"/api/public/traces/{trace_id}", {}).get("metadata")
        except httpx2.HTTPStatusError as error:
            if error.response.status_code != httpx2.codes.NOT_FOUND:
                raise
            return None
        if not isinstance(metadata, dict) or not {"tenant", "session_id"} <= metadata.keys():
            return None
        session = {"tenant": metadata["tenant"], "session_id": metadata["session_id"]}
        return session if trace_id_of(session) == trace_id else None

    def _get(self, path: str, parameters: dict[str, str | int]) -> Json:
        found: Json = self._http.get(path, params=parameters).raise_for_status().json()
        return found


class Trace:
    """A session as Langfuse names its parts, and what was said about it before."""

    def __init__(self, client: Client, session: Json) -> None:
        """Read a session.

        Raises:
            NotFound: The proxy has none of this id.
        """
        self.session_id: str = session["session_id"]
        turn_ids = [turn["turn_id"] for turn in client.turns(self.session_id)]
        self.turns: dict[str, str | None] = {span_id_of(session, turn_id): turn_id for turn_id in turn_ids}
        self.turns[span_id_of(session, "")] = None  # the session's own span
        given = client.feedback_of(self.session_id)
        self.posted = {(each["turn_id"], each["kind"], each["name"]): each["value"] for each in given}


def pass_on(client: Client, langfuse: Langfuse, source: str = "ANNOTATION") -> Json:
    """Post the scores that are new or changed, and withdraw those that are gone; return how many of each.

    Some are of no stored turn or session, and are counted.
    """
    traces: dict[str, Trace | None] = {}
    counts = {"posted": 0, "withdrawn": 0, "without_turn": 0}
    said: set[tuple[str, str | None, str, str]] = set()
    label = label_of(source)
    for score in langfuse.scores(source):
        kind, subject = KINDS.get(score["dataType"]), score.get("subject") or {}
        is_of_turn = subject.get("kind") == "observation"
        trace_id = subject.get("traceId" if is_of_turn else "id")
        if kind is None or score["value"] in (None, "") or subject.get("kind") not in ABOUT or not trace_id:
            continue
        if trace_id not in traces:
            traces[trace_id] = _trace(client, langfuse, trace_id)
        trace = traces[trace_id]
        if trace is None or (is_of_turn and subject["id"] not in trace.turns):
            counts["without_turn"] += 1
            continue
        turn_id = trace.turns[subject["id"]] if is_of_turn else None
        said.add((trace.session_id, turn_id, kind, score["name"]))
        if turn_id is None and kind == "demonstration":
            counts["without_turn"] += 1
        elif trace.posted.get((turn_id, kind, score["name"])) != score["value"]:
            where: dict[str, str] = {"session_id": trace.session_id} if turn_id is None else {"turn_id": turn_id}
            client.feedback(kind, score["value"], name=score["name"], source=label, **where)  # type: ignore[arg-type]
            trace.posted[turn_id, kind, score["name"]] = score["value"]
            counts["posted"] += 1
    counts["withdrawn"] = _withdraw(client, langfuse, label, said)
    return counts


def label_of(source: str) -> str:
    """Return how feedback is marked that comes from scores of a source: each pass withdraws its own alone."""
    return SOURCE if source == "ANNOTATION" else f"{SOURCE} {source}"


def _withdraw(client: Client, langfuse: Langfuse, label: str, said: set[tuple[str, str | None, str, str]]) -> int:
    """Take back what is no score any more; of a trace that is gone, as by retention, everything stays."""
    gone: dict[str, list[Json]] = {}
    for each in client.feedback_from(label):
        if (each["session_id"], each["turn_id"], each["kind"], each["name"]) not in said:
            gone.setdefault(each["session_id"], []).append(each)
    num_withdrawn = 0
    for session_id, own in gone.items():
        session = {"tenant": client.session(session_id)["tenant"], "session_id": session_id}
        if langfuse.session_of(trace_id_of(session)) is None:
            continue
        for each in own:
            target = {"turn_id": each["turn_id"]} if each["turn_id"] else {"session_id": session_id}
            client.withdraw_feedback(each["kind"], name=each["name"], **target)
            num_withdrawn += 1
    return num_withdrawn


def _trace(client: Client, langfuse: Langfuse, trace_id: str) -> Trace | None:
    session = langfuse.session_of(trace_id)
    try:
        return None if session is None else Trace(client, session)
    except NotFound as error:
        log.info("the scores of trace %s are left out: %s", trace_id, error)
        return None


@click.command()
@click.option("--langfuse", "url", default="https://cloud.langfuse.com", show_default=True, help="Langfuse's address.")
@click.option("--langfuse-keys", "keys", envvar="LANGFUSE_KEYS", required=True, help="PUBLIC_KEY:SECRET_KEY.")
@click.option("--source", default="ANNOTATION", show_default=True, help="Source of the scores: ANNOTATION, API, EVAL.")
@click.option("--proxy", default=DEFAULT_BASE_URL, show_default=True, help="The proxy with the sessions.")
@click.option("--api-key", envvar="TURNWISE_API_KEY", help="A key that may read sessions and give rewards.")
@click.option("--every", type=click.FloatRange(min=1), help="Seconds between passes [default: one pass].")
def main(url: str, keys: str, source: str, proxy: str, api_key: str | None, every: float | None) -> None:
    """Post the scores that annotators gave in Langfuse as feedback."""
    logging.basicConfig(level=logging.INFO)
    langfuse = Langfuse(url, keys)
    with Client(proxy, api_key) as client:
        run_passes(lambda: pass_on(client, langfuse, source), every)


if __name__ == "__main__":
    main()
