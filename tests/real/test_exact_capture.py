"""Capture against a real vLLM: the stored tokens are the sampled ones, and an append-only history is one chain.

Sessions of several agents each, at temperature 1, through the plain openai client: half of them streaming, with tools,
turns cut by length and by stop strings, text beyond ASCII, branches of n = 2, two sub-agents interleaved, a third of
the calls concurrent.
"""

import asyncio
import collections
import dataclasses
import random

import numpy as np
import pytest
from openai import AsyncOpenAI
from support.proxies import RunningProxy

from turnwise.default_models.trail import SYSTEM_PROMPT, TOOLS

pytestmark = pytest.mark.engine

USER_TEXTS = [
    "Follow each boss from Kim. Which city?",
    "¿Quién es Žofie?",
    "誰が社長ですか。",
    'Say: {"a": [1, 2]}',
    "🙂\n\n\tok",
]
TOOL_TEXTS = ['{"boss": "Ben", "friend": "Cleo"}', '{"city": "Łódź"}', "no such person"]


@dataclasses.dataclass
class Agent:
    """One append-only conversation, and the tokens that the engine reported as sampled."""

    name: str
    messages: list
    turn_ids: list[str] = dataclasses.field(default_factory=list)
    echoes: dict[str, tuple[list[int], list[int]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Played:
    session_id: str
    agents: list[Agent]


async def sample(client: AsyncOpenAI, agent: Agent, rng: random.Random, *, stream: bool) -> None:
    wanted: dict = {
        "model": "small",
        "messages": agent.messages,
        "temperature": 1.0,
        "max_completion_tokens": rng.choice([3, 8, 24]),
        "extra_body": {"return_token_ids": True},
    }
    if agent.name != "plain":
        wanted["tools"] = TOOLS
    if rng.random() < 0.2:
        wanted["stop"] = ["a", "The"]
    reply = await (streamed(client, wanted) if stream else complete(client, wanted))
    turn_id, message, prompt, sampled = reply
    agent.turn_ids.append(turn_id)
    agent.echoes[turn_id] = (prompt, sampled)
    agent.messages.append(message)
    for call in message.get("tool_calls") or []:
        agent.messages.append({"role": "tool", "tool_call_id": call["id"], "content": rng.choice(TOOL_TEXTS)})
    if not message.get("tool_calls"):
        agent.messages.append({"role": "user", "content": rng.choice(USER_TEXTS)})


async def complete(client: AsyncOpenAI, wanted: dict) -> tuple[str, dict, list[int], list[int]]:
    completion = await client.chat.completions.create(**wanted)
    choice = completion.choices[0]
    return completion.id, choice.message.model_dump(exclude_none=True), completion.prompt_token_ids, choice.token_ids


async def streamed(client: AsyncOpenAI, wanted: dict) -> tuple[str, dict, list[int], list[int]]:
    content, calls, prompt, sampled, turn_id = "", {}, [], [], ""
    async for chunk in await client.chat.completions.create(**wanted, stream=True):
        turn_id = chunk.id
        prompt = getattr(chunk, "prompt_token_ids", None) or prompt
        for choice in chunk.choices:
            sampled += getattr(choice, "token_ids", None) or []
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(
                    part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] = part.id or call["id"]
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    message: dict = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return turn_id, message, prompt, sampled


async def play(url: str, number: int, num_turns: int, http: AsyncOpenAI) -> Played:
    rng = random.Random(number)
    session_id = f"exact-{number}"
    client = http.with_options(base_url=f"{url}/sessions/{session_id}/v1")
    system = {"role": "system", "content": SYSTEM_PROMPT}
    agents = [
        Agent("main", [system, {"role": "user", "content": USER_TEXTS[number % len(USER_TEXTS)]}]),
        Agent("helper", [{"role": "system", "content": "You help."}, {"role": "user", "content": USER_TEXTS[1]}]),
        Agent("plain", [{"role": "user", "content": USER_TEXTS[2]}]),
    ]
    for _ in range(num_turns):
        if rng.random() < 1 / 3:
            await asyncio.gather(*(sample(client, agent, rng, stream=number % 2 == 0) for agent in agents[:2]))
        else:
            await sample(client, rng.choice(agents), rng, stream=number % 2 == 0)
    return Played(session_id, agents)


async def play_all(url: str, num_sessions: int, concurrency: int = 16) -> list[Played]:
    places = asyncio.Semaphore(concurrency)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as http:

        async def one(number: int) -> Played:
            async with places:
                return await play(url, number, 6 + number % 7, http)

        return list(await asyncio.gather(*(one(number) for number in range(num_sessions))))


def check(proxy: RunningProxy, played: list[Played]) -> collections.Counter[str]:
    """Check every turn against the engine's echo; return how many there were, and how many left their chain."""
    counts: collections.Counter[str] = collections.Counter()
    for session in played:
        stored = {view.turn.turn_id: view for view in proxy.turns(session.session_id)}
        assert set(stored) == {turn_id for agent in session.agents for turn_id in agent.turn_ids}
        for agent in session.agents:
            for turn_id, (prompt, sampled) in agent.echoes.items():
                view = stored[turn_id]
                assert view.prompt_token_ids.tolist() == prompt
                assert view.turn.token_ids.tolist() == sampled
                assert len(view.turn.logprobs) == len(sampled)
            turns = [stored[turn_id].turn for turn_id in agent.turn_ids]
            counts["turns"] += len(turns)
            counts["breaks"] += sum(turn.parent_turn_id is None for turn in turns[1:])
            counts["chains"] += len({turn.chain_id for turn in turns})
            counts["agents"] += bool(turns)
            counts.update(f"{turn.outcome.value}:{turn.reason or ''}" for turn in turns)
    return counts


NUM_SESSIONS = [pytest.param(16), pytest.param(200, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_sessions", NUM_SESSIONS)
def test_an_append_only_history_is_one_chain_of_exactly_the_engines_tokens(
    engine, start_proxy, small_model_dir, num_sessions
):
    proxy = start_proxy(engine.url)
    played = asyncio.run(play_all(proxy.url, num_sessions))
    counts = check(proxy, played)
    print(f"\ncontinuation on: {dict(counts)}")
    assert counts["turns"] >= num_sessions * 6
    assert counts["breaks"] == 0
    assert counts["chains"] == counts["agents"]
    assert counts["exact:"] == counts["turns"]
    gap = largest_logprob_gap(proxy, played, small_model_dir)
    print(f"largest |behaviour logprob - transformers| over {counts['turns']} turns: {gap:.2g} nats")
    assert gap < 1e-3


@pytest.mark.parametrize("num_sessions", NUM_SESSIONS)
def test_without_continuation_the_same_agents_break_their_chains(engine, start_proxy, num_sessions):
    """With continuation off, histories are tokenised again, tokens drift, and turns record the reason."""
    proxy = start_proxy(engine.url, "--no-continuation")
    counts = check(proxy, asyncio.run(play_all(proxy.url, num_sessions)))
    print(f"\ncontinuation off: {dict(counts)}")
    assert counts["breaks"] == counts["turns"] - counts["agents"]
    assert counts["retokenised:continuation_off"] == counts["breaks"]


def largest_logprob_gap(proxy: RunningProxy, played: list[Played], model_dir) -> float:
    """Compare the stored logprobs with a transformers forward over the same ids."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    worst = 0.0
    with torch.inference_mode():
        for session in played:
            for view in proxy.turns(session.session_id):
                ids = torch.from_numpy(np.concatenate([view.prompt_token_ids, view.turn.token_ids])).long()[None]
                logits = model(ids).logits[0, view.turn.prompt_length - 1 : -1]
                ours = torch.log_softmax(logits, -1).gather(1, ids[0, view.turn.prompt_length :, None])[:, 0]
                worst = max(worst, float((ours - torch.tensor(view.turn.logprobs.copy())).abs().max()))
    return worst


def test_two_choices_of_one_call_are_two_turns_and_both_can_be_extended(engine, start_proxy):
    """With n = 2 a call starts a branch: both continue exactly, each on its own chain."""
    proxy = start_proxy(engine.url)

    async def branch() -> None:
        async with AsyncOpenAI(base_url=proxy.session_v1("branch"), api_key="none") as client:
            opening = [{"role": "user", "content": "Hello."}]
            both = await client.chat.completions.create(
                model="small",
                messages=opening,
                n=2,
                temperature=1.5,
                max_completion_tokens=24,
                # Random text, so that the replies differ: equal ones could not be told apart.
                extra_body={"min_tokens": 24, "structured_outputs": {"regex": "[a-z0-9]{24}"}},
            )
            assert both.choices[0].message != both.choices[1].message
            for choice in both.choices:
                history = [
                    *opening,
                    choice.message.model_dump(exclude_none=True),
                    {"role": "user", "content": "Go on."},
                ]
                await client.chat.completions.create(model="small", messages=history, max_completion_tokens=8)

    asyncio.run(branch())
    turns = [view.turn for view in proxy.turns("branch")]
    roots, children = turns[:2], turns[2:]
    assert [turn.turn_id for turn in roots] == [roots[0].turn_id, f"{roots[0].turn_id}#1"]
    assert {turn.outcome.value for turn in turns} == {"exact"}
    assert {turn.parent_turn_id for turn in children} == {turn.turn_id for turn in roots}
    assert len({turn.chain_id for turn in turns}) == 2
