"""A stand-in for the proxy's HTTP surface, for tests of the SDK alone: sessions, turns, rewards and a scripted model.

It keeps what it receives and computes no credit: the store does, and is tested there. A reply is a function of the
messages; a token is a character, its id the character's code point, and the logprob of the k-th token is -(k + 1) / 8.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def render(messages: list[Json]) -> str:
    """The chat template: a later prompt extends an earlier one and its reply, as long as the history is repeated."""
    lines = "".join(f"<{m['role']}>{m.get('content') or ''}." for m in messages)
    return f"{lines}<assistant>"


def echo(messages: list[Json]) -> str:
    return f"re:{messages[-1]['content']}"


@dataclasses.dataclass
class StandIn:
    """Received requests, and the scripted behaviour."""

    reply: Callable[[list[Json]], str] = echo
    sessions: dict[str, Json] = dataclasses.field(default_factory=dict)
    turns: list[Json] = dataclasses.field(default_factory=list)
    rewards: list[Json] = dataclasses.field(default_factory=list)
    policies: list[Json] = dataclasses.field(default_factory=list)
    answers_by_key: dict[str, Json] = dataclasses.field(default_factory=dict)
    refusals: list[tuple[int, dict[str, str]]] = dataclasses.field(default_factory=list)
    """Statuses and headers of the refusals of the next requests."""
    refusal: str = "too much at once"
    lose_answers: int = 0
    """Number of the next writes that are applied without an answer."""
    requests: list[Request] = dataclasses.field(default_factory=list)
    policy_version: int = 3
    base_url: str = ""

    def turns_of(self, session_id: str) -> list[Json]:
        return [turn for turn in self.turns if turn["session_id"] == session_id]

    def rewards_of(self, session_id: str) -> list[Json]:
        own = {turn["turn_id"] for turn in self.turns_of(session_id)}
        return [r for r in self.rewards if r.get("session_id") == session_id or r.get("turn_id") in own]

    def open(self, fields: Json) -> Json:
        session_id = fields["session_id"]
        defaults = {"split": "train", "credit": "propagate", "run": 0, "status": "open", "termination_reason": None}
        return self.sessions.setdefault(session_id, {**defaults, **fields})


def create_app(state: StandIn) -> Starlette:  # noqa: C901  a table of small routes over one state
    async def create_session(request: Request) -> Json:
        session = state.open(fields := await request.json())
        session |= fields
        url = f"{state.base_url}/sessions/{session['session_id']}/v1"
        return {**session, "base_url": url, "api_key": f"key-{session['session_id']}"}

    async def list_sessions(request: Request) -> Json:
        return page(list(state.sessions.values()), "session_id", request)

    async def get_session(request: Request) -> Json:
        return state.sessions[request.path_params["session_id"]]

    async def get_turns(request: Request) -> Json:
        _ = state.sessions[request.path_params["session_id"]]
        return page(state.turns_of(request.path_params["session_id"]), "turn_id", request)

    async def get_turn(request: Request) -> Json:
        return next(t for t in state.turns if t["turn_id"] == request.path_params["turn_id"])

    async def end(request: Request) -> Json:
        session, body = state.sessions[request.path_params["session_id"]], await request.json()
        if body.get("reward") is not None:
            state.rewards.append({"session_id": session["session_id"], "value": body["reward"]})
        session |= {"status": "ended", "termination_reason": body.get("termination_reason")}
        return session

    async def rewards(request: Request) -> Json:
        key = request.headers["idempotency-key"]
        if key not in state.answers_by_key:
            lines = await request.json()
            state.rewards += lines
            state.answers_by_key[key] = {"data": [{"turns": reached(state, line)} for line in lines]}
        return state.answers_by_key[key]

    async def experiences(request: Request) -> Response:
        lines = [json.dumps({"turn_ids": [turn["turn_id"]]}) for turn in state.turns]
        return Response("\n".join(lines) + "\n", media_type="application/jsonl")

    async def publish(request: Request) -> Json:
        state.policies.append({"version": len(state.policies), **await request.json()})
        return state.policies[-1]

    async def policies(request: Request) -> Json:
        return page(state.policies, "version", request)

    async def activate(request: Request) -> Json:
        return {"version": int(request.path_params["version"]), "status": "active"}

    async def models(request: Request) -> Json:
        return {"data": [{"id": "served"}]}

    async def ready(request: Request) -> Json:
        return {}

    async def chat(request: Request) -> Response:
        body = await request.json()
        session_id = request.path_params.get("session_id") or request.headers["x-session-id"]
        session = state.open({"session_id": session_id})
        if session["status"] != "open":
            return problem(409, "the session has ended")
        completion = sample(state, session_id, request.headers.get("x-step"), body)
        if not body.get("stream"):
            return JSONResponse(completion, headers={"x-policy-version": str(state.policy_version)})
        return StreamingResponse(chunks(completion), media_type="text/event-stream")

    def routed(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def route(request: Request) -> Response:
            state.requests.append(request)
            if state.refusals:
                status, headers = state.refusals.pop(0)
                return problem(status, state.refusal, headers)
            try:
                answer = await handler(request)
            except (KeyError, StopIteration):
                return problem(404, f"there is nothing at {request.url.path!r}")
            if request.method == "POST" and state.lose_answers:
                state.lose_answers -= 1
                return problem(503, "the answer was lost")
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return route

    table = [
        ("POST", "/v1/sessions", create_session),
        ("GET", "/v1/sessions", list_sessions),
        ("GET", "/v1/sessions/{session_id}", get_session),
        ("GET", "/v1/sessions/{session_id}/turns", get_turns),
        ("POST", "/v1/sessions/{session_id}/end", end),
        ("GET", "/v1/turns/{turn_id}", get_turn),
        ("POST", "/v1/rewards", rewards),
        ("GET", "/v1/experiences", experiences),
        ("GET", "/v1/policies", policies),
        ("POST", "/v1/policies", publish),
        ("POST", "/v1/policies/{version}/activate", activate),
        ("GET", "/v1/models", models),
        ("GET", "/readyz", ready),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/sessions/{session_id}/v1/chat/completions", chat),
    ]
    return Starlette(routes=[Route(path, routed(handler), methods=[method]) for method, path, handler in table])


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def page(rows: list[Json], id_field: str, request: Request) -> Json:
    after = request.query_params.get("after")
    start = next(i for i, row in enumerate(rows) if str(row[id_field]) == after) + 1 if after else 0
    limit = int(request.query_params.get("limit", 100))
    return {"data": rows[start : start + limit], "has_more": len(rows) > start + limit}


def reached(state: StandIn, line: Json) -> int:
    turns = [t for t in state.turns if line.get("turn_id", t["turn_id"]) == t["turn_id"]]
    turns = [t for t in turns if line.get("session_id", t["session_id"]) == t["session_id"]]
    return len([t for t in turns if line.get("step", t["step"]) == t["step"]])


def sample(state: StandIn, session_id: str, step: str | None, body: Json) -> Json:
    prompt = encode(render(body["messages"]))
    completion_id = f"chatcmpl-{len(state.turns)}"
    choices = []
    for index in range(body.get("n") or 1):
        text = state.reply(body["messages"])
        tokens = encode(text)
        seq = len(state.turns_of(session_id))
        turn = {
            "turn_id": f"{completion_id}#{index}" if index else completion_id,
            "session_id": session_id,
            "seq": seq,
            "step": seq if step is None else int(step),
            "messages": body["messages"],
            "tools": body.get("tools"),
            "response": {"role": "assistant", "content": text},
            "prompt_token_ids": prompt,
            "token_ids": tokens,
            "logprobs": [-(k + 1) / 8 for k in range(len(tokens))],
            "finish_reason": "stop",
            "outcome": "exact",
            "policy_version_first": state.policy_version,
            "policy_version_last": state.policy_version,
        }
        state.turns.append(turn)
        logprobs = [{"token": t, "logprob": p, "top_logprobs": []} for t, p in zip(text, turn["logprobs"], strict=True)]
        choices.append(
            {
                "index": index,
                "message": turn["response"],
                "finish_reason": "stop",
                "logprobs": {"content": logprobs} if body.get("logprobs") else None,
                "token_ids": tokens,
            }
        )
    head = {"id": completion_id, "object": "chat.completion", "created": 0, "model": body["model"]}
    return {**head, "choices": choices, "prompt_token_ids": prompt}


def chunks(completion: Json) -> Iterator[str]:
    head = {"id": completion["id"], "object": "chat.completion.chunk", "created": 0, "model": completion["model"]}
    for choice in completion["choices"]:
        delta = {"role": "assistant", "content": choice["message"]["content"]}
        body = {"index": choice["index"], "delta": delta, "finish_reason": "stop", "logprobs": choice["logprobs"]}
        extra = {"prompt_token_ids": completion["prompt_token_ids"]}
        yield f"data: {json.dumps({**head, **extra, 'choices': [{**body, 'token_ids': choice['token_ids']}]})}\n\n"
    yield "data: [DONE]\n\n"


@contextlib.contextmanager
def serving(state: StandIn) -> Iterator[StandIn]:
    """Serve it on a free port, from a thread."""
    server = uvicorn.Server(uvicorn.Config(create_app(state), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline, "the stand-in did not start"
        time.sleep(0.005)
    state.base_url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join(10)
