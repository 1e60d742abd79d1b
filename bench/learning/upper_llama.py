"""Sessions of the bosses task by a Llama whose upper third is trained: the lower states are kept from the sampling.

So an update computes a third of the layers, and the opening that all sessions share is computed once. In bfloat16, on
one thread. Legend: N tokens of all sessions, B sessions, T places of the cache, W places of the widest row, M sampled
tokens, D width, H heads, G heads of keys and values, d width of a head.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from examples.bosses import agent, tasks

HALF = torch.bfloat16
MAX_NEW = 12
MOST_TOKENS = 140
"""Tokens of a session behind the opening."""
RANK = 16
SCALE = 2.0
TEMPERATURE = 0.8
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
Adapter = dict[tuple[int, str], tuple[nn.Parameter, nn.Parameter]]


class Llama:
    """The weights, and what one layer computes; with an adapter on the upper layers."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        weights = load_file(directory / "model.safetensors")
        self.num_layers, self.width = config["num_hidden_layers"], config["hidden_size"]
        self.first = 2 * self.num_layers // 3
        """The first layer that is trained."""
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_width, self.epsilon = self.width // self.heads, config["rms_norm_eps"]
        self.embeddings, self.norm = (weights[f"model.{name}.weight"].to(HALF) for name in ("embed_tokens", "norm"))
        self.layers = []
        for number in range(self.num_layers):
            place = f"model.layers.{number}."
            norms = {name: weights[f"{place}{name}_layernorm.weight"].to(HALF) for name in ("input", "post_attention")}
            block = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}
            linear = {
                name: torch.cat([weights[f"{place}{block[name]}.{part}.weight"] for part in parts]).to(HALF)
                for name, parts in FUSED.items()
            }
            self.layers.append(norms | linear)
        rates = config["rope_theta"] ** -(torch.arange(0, self.head_width, 2) / self.head_width)
        angles = torch.arange(1024)[:, None] * rates.repeat(2)[None]
        self.cos, self.sin = angles.cos().to(HALF), angles.sin().to(HALF)
        self.adapter: Adapter = {}

    def new_adapter(self, seed: int) -> list[nn.Parameter]:
        """Start from the base model again; return the parameters."""
        drawn = torch.Generator().manual_seed(seed)
        self.adapter = {}
        for number in range(self.first, self.num_layers):
            for name in FUSED:
                size, width = self.layers[number][name].shape
                down = (torch.rand(RANK, width, generator=drawn) * 2 - 1) / math.sqrt(width)
                self.adapter[number, name] = nn.Parameter(down), nn.Parameter(torch.zeros(size, RANK))
        return [each for pair in self.adapter.values() for each in pair]

    def linear(self, x: Tensor, number: int, name: str) -> Tensor:
        out = nn.functional.linear(x, self.layers[number][name])
        if (number, name) not in self.adapter:
            return out
        down, up = self.adapter[number, name]
        return out + nn.functional.linear(nn.functional.linear(x, down.to(HALF)), SCALE * up.to(HALF))

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (self.width,), weight, self.epsilon)

    def queries_keys_values(self, x: Tensor, number: int, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = self.linear(self.normed(x, self.layers[number]["input"]), number, "qkv")
        out = out.view(len(x), self.heads + 2 * self.groups, self.head_width)
        q, k, v = out.split([self.heads, self.groups, self.groups], 1)
        return self._turned(q, at), self._turned(k, at), v

    def _turned(self, x: Tensor, at: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos[at][:, None] + torch.cat([-second, first], -1) * self.sin[at][:, None]

    def attended(self, q_wide: Tensor, keys: Tensor, values: Tensor, mask_rows: Tensor) -> Tensor:
        size, width = q_wide.shape[:2]
        share = self.heads // self.groups
        q = q_wide.view(size, width, self.groups, share, -1).permute(0, 2, 3, 1, 4)
        mask = mask_rows[:, None].expand(-1, share, -1, -1).reshape(len(mask_rows), 1, share * width, -1)
        out = nn.functional.scaled_dot_product_attention(
            q.reshape(size, self.groups, share * width, -1), keys, values, mask
        )
        out = out.view(size, self.groups, share, width, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(size, width, self.width)

    def rest(self, x: Tensor, attended: Tensor, number: int) -> Tensor:
        """Return what a layer makes of its input and its attention."""
        x = x + self.linear(attended, number, "o")
        gate, up = self.linear(self.normed(x, self.layers[number]["post_attention"]), number, "gate_up").chunk(2, -1)
        return x + self.linear(nn.functional.silu(gate) * up, number, "down")

    def log_p(self, x: Tensor) -> Tensor:
        """Return the logprobs of the next token, at the temperature of the agent. [.., V]."""
        return torch.log_softmax(
            nn.functional.linear(self.normed(x, self.norm), self.embeddings).float() / TEMPERATURE, -1
        )


@dataclasses.dataclass
class Played:
    """One session."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    is_sampled: list[bool] = dataclasses.field(default_factory=list)
    behaviour: list[float] = dataclasses.field(default_factory=list)
    """Logprobs of the sampled tokens."""
    low: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """Inputs of the first trained layer."""
    last: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """State of the last token that was fed, at two thirds of the depth."""
    said: str = ""
    """The text of the replies."""
    reward: float = 0.0
    reference: list[float] | None = None
    """Logprobs of the sampled tokens under the base model, once they are known."""


class Player:
    """Plays sessions with one model's present adapter, and computes what they sampled again."""

    def __init__(self, model: Llama, directory: Path) -> None:
        self.model = model
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        (self._end,) = self._encode("<|im_end|>")
        self._opening = self._encode("".join(_message(each["role"], each["content"]) for each in agent.OPENING))
        self._low = torch.empty(0)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @torch.inference_mode()
    def play(self, split: str, indices: Sequence[int], seed: int, drawn: torch.Generator) -> list[Played]:
        """Play each of these tasks once."""
        todo = [tasks.make_task(split, index, seed) for index in indices]
        cache = _Cache(self.model, self._opening, len(todo))
        self._low = cache.opening_low
        played, texts = [Played() for _ in todo], [""] * len(todo)
        for session, task in zip(played, todo, strict=True):
            self._say(session, _message("user", task.question))
        live = list(range(len(todo)))
        for turn in range(agent.MAX_TURNS):
            replies = self._replies(cache, played, live, drawn)
            going = []
            for row in live:
                texts[row] = self._tokenizer.decode(replies[row], skip_special_tokens=True)
                played[row].said += f"{texts[row]}\n"
                command = agent.COMMAND.fullmatch(texts[row].strip())
                if command and turn + 1 < agent.MAX_TURNS:
                    ended = "" if replies[row][-1] == self._end else "<|im_end|>"
                    self._say(played[row], f"{ended}\n" + _message("user", todo[row].records.get(command[1], "nobody")))
                    going.append(row)
                elif command:
                    texts[row] = ""
            live = going
        for row, (session, task) in enumerate(zip(played, todo, strict=True)):
            session.low, session.last = cache.low[row, : len(session.tokens) - 1].clone(), cache.last[row].float()
            session.reward = tasks.reward(task, texts[row])
        return played

    def _say(self, session: Played, text: str) -> None:
        tokens = self._encode(f"{text}<|im_start|>assistant\n")
        session.tokens += tokens
        session.is_sampled += [False] * len(tokens)

    def _replies(
        self, cache: _Cache, played: Sequence[Played], live: Sequence[int], drawn: torch.Generator
    ) -> dict[int, list[int]]:
        replies: dict[int, list[int]] = {row: [] for row in live}
        going = list(live)
        for _ in range(MAX_NEW):
            if not going:
                break
            log_p_BV = self.model.log_p(cache.feed(going, [played[row].tokens for row in going]))
            below_BV = log_p_BV.exp().cumsum(-1)
            at = torch.searchsorted(below_BV, torch.rand(len(going), 1, generator=drawn) * below_BV[:, -1:])
            token_B = at[:, 0].clamp(max=below_BV.shape[1] - 1)
            logprobs = log_p_BV.gather(1, token_B[:, None])[:, 0].tolist()
            for row, token, logprob in zip(going, token_B.tolist(), logprobs, strict=True):
                session = played[row]
                session.tokens.append(token)
                session.is_sampled.append(True)
                session.behaviour.append(logprob)
                replies[row].append(token)
            going = [row for row in going if replies[row][-1] != self._end]
        return replies

    def logprobs(self, played: Sequence[Played]) -> tuple[Tensor, Tensor]:
        """Return the logprobs of what the sessions sampled, in their order [M], and the session of each [M]."""
        model, size, start = self.model, len(played), len(self._opening)
        lengths = [len(each.low) for each in played]
        wide = max(lengths)
        place_N = torch.cat([torch.arange(length) + row * wide for row, length in enumerate(lengths)])
        at_N = torch.cat([torch.arange(start), *(torch.arange(length) + start for length in lengths)])
        x_ND = torch.cat([self._low, *(each.low for each in played)]).clone()
        of_opening = torch.ones(start, start, dtype=torch.bool).tril()[None]
        own = torch.ones(wide, wide, dtype=torch.bool).tril()
        of_rows = torch.cat([torch.ones(wide, start, dtype=torch.bool), own], 1)[None]

        def padded(x: Tensor) -> Tensor:
            return x.new_zeros(size * wide, *x.shape[1:]).index_copy(0, place_N, x).view(size, wide, *x.shape[1:])

        for number in range(model.first, model.num_layers):
            q, k, v = model.queries_keys_values(x_ND, number, at_N)
            shared = [each[:start].transpose(0, 1)[None] for each in (k, v)]
            opening = model.attended(q[None, :start], *shared, of_opening)[0]
            keys, values = (
                torch.cat([before.expand(size, -1, -1, -1), padded(each[start:]).transpose(1, 2)], 2)
                for before, each in zip(shared, (k, v), strict=True)
            )
            rows = model.attended(padded(q[start:]), keys, values, of_rows).reshape(size * wide, -1)[place_N]
            x_ND = model.rest(x_ND, torch.cat([opening, rows]), number)
        begins = [start + sum(lengths[:row]) for row in range(size)]
        found = [
            (begin + place - 1, each.tokens[place], row)
            for row, (begin, each) in enumerate(zip(begins, played, strict=True))
            for place, is_sampled in enumerate(each.is_sampled)
            if is_sampled
        ]
        predictor, token, session = torch.tensor(found).T
        return model.log_p(x_ND[predictor]).gather(1, token[:, None])[:, 0], session


class _Cache:
    """Keys and values of sessions that are played at once; the tokens of each lie without gaps."""

    def __init__(self, model: Llama, opening: Sequence[int], size: int) -> None:
        self._model, self._start = model, len(opening)
        shape = size, model.groups, self._start + MOST_TOKENS, model.head_width
        self._keys, self._values = ([torch.zeros(shape, dtype=HALF) for _ in model.layers] for _ in range(2))
        self._fed = [0] * size
        self.low = torch.zeros(size, MOST_TOKENS, model.width, dtype=HALF)
        self.last = torch.zeros(size, model.width, dtype=HALF)
        x, at = model.embeddings[torch.tensor(opening)], torch.arange(self._start)
        mask = torch.ones(self._start, self._start, dtype=torch.bool).tril()[None]
        for number in range(model.num_layers):
            if number == model.first:
                self.opening_low = x.clone()
            q, k, v = model.queries_keys_values(x, number, at)
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            self._keys[number][:, :, : self._start], self._values[number][:, :, : self._start] = k, v
            x = model.rest(x, model.attended(q[None], k[None], v[None], mask)[0], number)

    def feed(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Feed what is new of these rows; return the states behind it. [B, D]."""
        model, whole = self._model, torch.tensor(rows)
        new = [each[self._fed[row] :] for row, each in zip(rows, tokens, strict=True)]
        counts = [len(each) for each in new]
        wide, end = max(counts), self._start + max(map(len, tokens))
        row_N = whole.repeat_interleave(torch.tensor(counts))
        at_N = torch.cat([torch.arange(self._fed[row], len(each)) for row, each in zip(rows, tokens, strict=True)])
        place_N = torch.cat([torch.arange(count) + number * wide for number, count in enumerate(counts)])
        at_BW = torch.full((len(rows) * wide,), end).index_copy(0, place_N, at_N + self._start).view(len(rows), wide)
        mask = torch.arange(end)[None, None] <= at_BW[:, :, None]
        last = torch.tensor(counts).cumsum(0) - 1
        x = model.embeddings[torch.tensor([token for each in new for token in each])]
        for number in range(model.num_layers):
            if number == model.first:
                self.low[row_N, at_N], self.last[whole] = x, x[last]
            q, k, v = model.queries_keys_values(x, number, at_N + self._start)
            self._keys[number][row_N, :, at_N + self._start] = k
            self._values[number][row_N, :, at_N + self._start] = v
            wide_q = q.new_zeros(len(rows) * wide, *q.shape[1:]).index_copy(0, place_N, q)
            keys, values = (of[number][whole, :, :end] for of in (self._keys, self._values))
            out = model.attended(wide_q.view(len(rows), wide, *q.shape[1:]), keys, values, mask)
            x = model.rest(x, out.reshape(len(rows) * wide, -1)[place_N], number)
        for row, count in zip(rows, counts, strict=True):
            self._fed[row] += count
        return x[last]


def _message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"
