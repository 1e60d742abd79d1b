"""The trainer's distribution against a real vLLM's: at the version that sampled, each token has the stored logprob."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from openai import AsyncOpenAI
from support.engines import RunningEngine
from support.proxies import RunningProxy, StartProxy

from trainer.batch.batch import build, with_ratio
from trainer.batch.sampling import Vocabulary, resolved
from trainer.batch.selection import why_untrainable
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from trainer.settings import TrainerSettings
from turnwise.chains import Experience
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
}
TRUNCATED: dict[str, Json] = {
    "top": {"top_p": 0.95, "top_k": 20, "temperature": 0.6},
    "min_p": {"min_p": 0.05},
    "top_mixture": PENALTIES | BIAS | WORDS | {"top_k": 15, "top_p": 0.9, "temperature": 1.2},
    "top_schema": schema(SCHEMA) | {"top_p": 0.9},
}
PLANTED: dict[str, Json] = {
    "schema": {"response_format": {"type": "json_object"}},
    "penalties": {"repetition_penalty": 1.0},
    "top": {"temperature": 1.0},
}
"""Parameters in place of those that were asked for."""
PER_KIND = 4


async def play(url: str, kinds: dict[str, Json]) -> None:
    """Play sessions of two turns of each kind; half of them stream."""
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as http:

        async def one(kind: str, number: int) -> None:
            client = http.with_options(base_url=f"{url}/sessions/{kind}-{number}/v1")
            messages: list = [{"role": "user", "content": f"Follow each boss from Kim, {number} times."}]
            for _ in range(2):
                body = {"temperature": 1.0} | kinds[kind]
                call = {"model": "small", "messages": messages, "max_completion_tokens": 40, "extra_body": body}
                if number % 2:
                    stream = await client.chat.completions.create(stream=True, **call)
                    text = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])
                else:
                    text = (await client.chat.completions.create(**call)).choices[0].message.content
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "On."}]
            await client.post(f"{url}/v1/sessions/{kind}-{number}/end", body={"reward": 1.0}, cast_to=object)

        await asyncio.gather(*(one(kind, number) for kind in kinds for number in range(PER_KIND)))


def played(proxy: RunningProxy, model_dir: Path) -> list[Experience]:
    database = Database(proxy.database_url)
    with database.read() as connection:
        found = list(stored_experiences.experiences(connection, SessionFilter(), PER_CHAIN))
    database.close()
    vocabulary = Vocabulary(str(model_dir))
    return [resolved(each, vocabulary) for each in found]


def gaps_of(found: list[Experience], model_dir: Path) -> dict[str, tuple[int, int, float]]:
    """Return by kind the sampled tokens, those that carry loss, and of these the largest |trainer − stored|."""
    batch = build(found, [np.zeros(len(each.turn_ids)) for each in found], policy_version=0)
    policy = Policy(TrainerSettings(model=str(model_dir)))
    policy.load(0)
    agent = PolicyAgent(policy, TrainerSettings(model=str(model_dir), row_tokens=2048))
    logprobs = agent.logprobs_of(batch, range(len(found)))
    assert with_ratio(batch).all()
    of_kind: dict[str, list[int]] = collections.defaultdict(list)
    for member, each in enumerate(found):
        of_kind[each.session_id.rpartition("-")[0]].append(member)
    table = {}
    for kind, members in of_kind.items():
        tokens = np.concatenate([batch.tokens_of[member] for member in members])
        gap = np.abs(logprobs[tokens] - batch.table.behaviour[tokens]).max(initial=0.0)
        table[kind] = sum(int(found[member].loss_mask.sum()) for member in members), len(tokens), float(gap)
    return table


def planted(found: list[Experience], kind: str, sampling: Json, model_dir: Path) -> list[Experience]:
    """Return the sessions of a kind as if their calls had asked for something else."""
    vocabulary = Vocabulary(str(model_dir))
    other = []
    for each in found:
        if each.session_id.startswith(f"{kind}-"):
            samplings = [of_turn | sampling for of_turn in each.info["sampling"]]
            other.append(resolved(dataclasses.replace(each, info=each.info | {"sampling": samplings}), vocabulary))
    return other


def test_every_kind_of_sampling_is_computed_again_within_a_ten_thousandth_of_a_nat(
    engine: RunningEngine, start_proxy: StartProxy
):
    """Of top-k, top-p and min-p a token may have no support. A schema or penalty that was not asked for shows."""
    kinds = KINDS | TRUNCATED
    proxy = start_proxy(engine.url)
    asyncio.run(play(proxy.url, kinds))
    found = played(proxy, engine.model_dir)
    reasons = {each.session_id: why_untrainable(each) for each in found}
    table = gaps_of(found, engine.model_dir)
    print()
    for kind, (sampled, trained, gap) in table.items():
        print(f"{kind:20} {sampled:6} sampled {trained:6} trained, largest gap {gap:.2g} nats")
    assert len(found) == len(kinds) * PER_KIND
    assert not {session: reason for session, reason in reasons.items() if any(reason)}
    assert all(table[kind][1] == table[kind][0] > 0 for kind in KINDS)
    assert sum(table[kind][1] for kind in TRUNCATED) >= 0.99 * sum(table[kind][0] for kind in TRUNCATED)
    assert {kind: gap for kind, (*_, gap) in table.items() if gap > 1e-4} == {}
    for kind, sampling in PLANTED.items():
        other = planted(found, kind, sampling, engine.model_dir)
        assert not any(any(why_untrainable(each)) for each in other)
        ((*_, gap),) = gaps_of(other, engine.model_dir).values()
        print(f"{kind:20} with another parameter: largest gap {gap:.2g} nats")
        assert gap > 0.1
