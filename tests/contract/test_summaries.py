"""Scripted harnesses compact, ask for titles, start sub-agents, retry and edit; the proxy finds what goes on from what.

The script knows what the next context was made of, and the proxy has only the calls. All is drawn from a seed.
"""

import dataclasses
import json
import random
from typing import Any

import httpx2
import pytest
from support.proxies import ProxyAndEngine
from turnwise_fake_engine import Reply, Rule
from turnwise_fake_engine.script import ToolCall

Json = dict[str, Any]
WORDS = (
    *("parser", "clock", "tests", "alpha", "beta", "gamma", "mended", "broken", "file", "line", "reads", "writes"),
    *("before", "after", "because", "the", "a", "next", "then", "cache", "index", "value", "error", "of", "in", "user"),
)
SYSTEM = {"role": "system", "content": "You write code."}
TITLES = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
SUMMARIZER = {"role": "system", "content": "Summarize the conversation that you are given, in your own words."}
PROMPTS = ("Summarize our conversation so far.", "The history is being compacted: say what matters.")
RESEARCH = {"type": "function", "function": {"name": "research", "parameters": {"type": "object"}}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


@dataclasses.dataclass
class Context:
    """What the harness sends, and the summaries that stand in each of its messages."""

    messages: list[Json]
    quoted: dict[int, str] = dataclasses.field(default_factory=dict)
    """The turn of the summary that a message was made of, by its place."""
    is_new: bool = False
    """Whether no call was made with it yet."""


class Harness:
    """One scripted harness with its session."""

    def __init__(self, world: ProxyAndEngine, seed: int) -> None:
        self.random = random.Random(seed)
        self.session_id = f"scripted-{seed}"
        self._url = world.proxy.session_v1(self.session_id)
        self._rules = world.engine.state.script.rules
        self.expected: dict[str, list[str]] = {}
        self.context = Context([SYSTEM, user(self.text(12))])
        self.num_compactions = 0

    def text(self, num_words: int) -> str:
        return " ".join(self.random.choice(WORDS) for _ in range(num_words))

    def call(self, messages: list[Json], reply: Reply, *, tools: bool = True, **headers: str) -> str:
        self._rules[:] = [Rule(reply=reply)]
        body: Json = {"model": "fake", "messages": messages} | ({"tools": [RESEARCH]} if tools else {})
        answer = httpx2.post(f"{self._url}/chat/completions", json=body, headers=headers, timeout=60)
        return str(answer.raise_for_status().json()["id"])

    def ask(self) -> str:
        """Make the next call of the agent; return its turn."""
        turn_id = self.call(self.context.messages, reply := Reply(text=self.text(self.random.randint(3, 20))))
        if self.context.is_new:
            self.expected[turn_id] = list(dict.fromkeys(self.context.quoted.values()))
            self.context.is_new = False
        self.context.messages += [{"role": "assistant", "content": reply.text}]
        return turn_id

    def turn(self) -> None:
        self.ask()
        self.context.messages += [user(self.text(self.random.randint(2, 12)))]

    def retry(self) -> None:
        """Throw the reply away, and ask again with the same messages."""
        before, was_new = list(self.context.messages), self.context.is_new
        self.ask()
        self.context.messages, self.context.is_new = before, was_new
        self.turn()

    def edit(self) -> None:
        """Replace the last message."""
        self.ask()
        self.context.messages[-2:] = [user(self.text(8))]
        self.context.is_new = all(each["role"] != "assistant" for each in self.context.messages)

    def title(self) -> None:
        quoted = self.context.messages[1]["content"]
        self.call([TITLES, user(f"{quoted} {self.text(4)}")], Reply(text=self.text(4)), tools=False)

    def sub_agent(self) -> None:
        """Let the agent call a tool with a task that quotes its context, and play the sub-agent in two turns."""
        task = f"{self.text(6)}\n{self.context.messages[1]['content']}"
        arguments = json.dumps({"task": task})
        called = Reply(tool_calls=[ToolCall(name="research", arguments=arguments)])
        turn_id = self.call(self.context.messages, called)
        if self.context.is_new:
            self.expected[turn_id] = list(dict.fromkeys(self.context.quoted.values()))
            self.context.is_new = False
        headers = {"x-claude-code-agent-id": self.text(1)} if self.random.random() < 0.5 else {}
        own = [SYSTEM, user(task)]
        self.call(own, found := Reply(text=self.text(9)), **headers)
        self.call(
            [*own, {"role": "assistant", "content": found.text}, user(self.text(5))], Reply(text="Done."), **headers
        )
        calls = [
            {"id": f"call_{turn_id}", "type": "function", "function": {"name": "research", "arguments": arguments}}
        ]
        self.context.messages += [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{turn_id}", "content": found.text},
        ]

    def compact(self) -> None:
        """Ask for a summary, at times twice, at times for nothing, and begin a context with what was said."""
        self.ask()
        kind = self.random.choice(("chain", "beside", "parts"))
        said = self.text(self.random.randint(30, 60))
        reply = self.random.choice((said, f"<think>{self.text(20)}</think>\n{said}", f"<summary>\n{said}\n</summary>"))
        attempts = [self.text(40), reply] if self.random.random() < 0.3 else [reply]
        prompt = user(f"{self.random.choice(PROMPTS)} {self.text(3)}")
        for attempt in attempts:
            summary = self._summary(kind, prompt, attempt)
        self.num_compactions += 1
        if self.random.random() < 0.15:  # the harness changes its mind
            self.context.messages += [user(self.text(5))]
            return
        self._begin(summary, said)

    def _summary(self, kind: str, prompt: Json, reply: str) -> str:
        if kind == "chain":
            return self.call([*self.context.messages, prompt], Reply(text=reply))
        transcript = json.dumps(self.context.messages)
        if kind == "beside":
            return self.call([SUMMARIZER, user(transcript)], Reply(text=reply), tools=False)
        middle, parts = len(transcript) // 2, [self.text(40), self.text(40)]
        ids = [
            self.call([SUMMARIZER, user(half)], Reply(text=part), tools=False)
            for half, part in zip((transcript[:middle], transcript[middle:]), parts, strict=True)
        ]
        both = self.call([SUMMARIZER, user("Merge:\n" + "\n\n".join(parts))], Reply(text=reply), tools=False)
        self.expected[both] = ids
        return both

    def _begin(self, summary: str, said: str) -> None:
        frame = self.random.choice(("{}", "Summary:\n{}", "<context>{}</context> Go on.", "(head) {}", "(tail) {}"))
        words = said.split()
        if frame == "(head) {}":
            said = " ".join(words[: len(words) * 3 // 4]) + " ..."
        elif frame == "(tail) {}":
            said = "... " + " ".join(words[len(words) // 4 :])
        elif self.random.random() < 0.3:
            said = "\n    ".join([" ".join(words[:7]), " ".join(words[7:])])
        kept, quoted = [SYSTEM], {}
        if self.random.random() < 0.4:  # the first message stays, whatever it is
            kept.append(self.context.messages[1])
            quoted |= {1: self.context.quoted[1]} if 1 in self.context.quoted else {}
        kept.append(user(frame.replace("{}", said)))
        self.context = Context([*kept, user(self.text(6))], quoted | {len(kept) - 1: summary}, is_new=True)

    def play(self) -> None:
        for _ in range(self.random.randint(6, 12)):
            action = self.random.choices(
                (self.turn, self.compact, self.title, self.sub_agent, self.retry, self.edit), (4, 4, 1, 1, 1, 1)
            )
            action[0]()
        self.turn()


def wrong(world: ProxyAndEngine, seed: int) -> tuple[list[str], int]:
    """Play a conversation; return the turns with another `continues_summary`, and the number of its compactions."""
    harness = Harness(world, seed)
    harness.play()
    url = f"{world.proxy.v1}/sessions/{harness.session_id}/turns"
    turns = httpx2.get(url, params={"limit": 500}, timeout=60).raise_for_status().json()["data"]
    found = [
        f"{seed}: turn {turn['seq']} ({turn['role']}): {turn['continues_summary']} instead of {said}"
        for turn in turns
        if (turn["continues_summary"] or []) != (said := harness.expected.get(turn["turn_id"], []))
    ]
    trained = {turn["turn_id"] for turn in turns if turn["role"] == "summary" and turn["summary_left_out"] is None}
    used = {summary for said in harness.expected.values() for summary in said}
    found += [f"{seed}: {len(trained ^ used)} summaries are trained or left out wrongly"] if trained - used else []
    return found, harness.num_compactions


@pytest.mark.parametrize("num", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_no_context_of_scripted_conversations_is_said_to_go_on_from_a_summary_that_it_does_not(shared_proxy, num):
    played = [wrong(shared_proxy, seed) for seed in range(num)]
    assert [each for found, _ in played for each in found] == []
    assert sum(compactions for _, compactions in played) >= 2 * num
