"""Replay of a grammar over a turn's sampled tokens: which ids it allowed at each of them.

The engine walks a grammar token by token and masks the logits; the same walk over the stored tokens gives the same
masks. vLLM 0.32 compiles a JSON schema, regex, choice or grammar with xgrammar, and a schema that xgrammar cannot
express with llguidance (vllm/sampling_params.py: _validate_structured_outputs; vllm/v1/structured_output). Both
libraries come with vLLM, and are imported where a turn needs them. With a reasoning parser, the grammar begins behind
the token that ends the thinking. A walk that refuses a sampled token shows that the engine used another grammar.
Legend: R sampled tokens of a turn, G distinct masks of it, W words of 32 ids.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from turnwise.types import Json

ANY_OBJECT = '{"type": "object"}'
THINK, END_THINK = "<think>", "</think>"
FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"}
    | {"uri-template", "json-pointer", "relative-json-pointer"}
)
"""Formats of strings that vLLM leaves to xgrammar."""
_COMMENT = re.compile(r"(#|//).*$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMasks:
    """What a grammar allowed."""

    words: npt.NDArray[np.int32]
    """Masks, a bit for each id, from the lowest bit on; the last one allows all. [G + 1, W]"""
    index: npt.NDArray[np.int64]
    """The mask of each token. [R]"""

    def allows(self, place: int) -> set[int]:
        """Return the ids that may stand at a place of the reply."""
        bits = np.unpackbits(self.words[self.index[place]].view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())


class NotReplayed(Exception):
    """A turn's grammar is unknown, or another one than the engine's."""


class _Walker(Protocol):
    """A grammar's state."""

    def mask(self) -> bytes | None:
        """Return the mask of the next token; None where all are allowed."""

    def accept(self, token: int) -> bool: ...


class Grammars:
    """The grammars of a model's vocabulary."""

    def __init__(self, model: str) -> None:
        self._model = model

    def masks(self, sampling: Json, prompt: Sequence[int], sampled: Sequence[int], ends: set[int]) -> GrammarMasks:
        """Return what the grammar of a call's parameters allowed at each sampled token.

        Args:
            sampling: The parameters.
            prompt: Ids of the prompt.
            sampled: Ids of the reply.
            ends: Ids that end it.

        Raises:
            NotReplayed: The grammar is unknown, or refuses a sampled token.
        """
        kind, text = grammar_of(sampling)
        for start in self._starts(prompt, sampled):
            found = _walked(self._walker(kind, text, ends), sampled, start)
            if found is not None:
                return found
        raise NotReplayed(f"the grammar {kind} refuses a token that was sampled")

    def _starts(self, prompt: Sequence[int], sampled: Sequence[int]) -> Iterator[int]:
        """Yield where the grammar may begin: at once, or behind the thinking, which may fill the whole reply."""
        yield 0
        vocabulary = self._tokenizer.get_vocab()
        think, end = vocabulary.get(THINK), vocabulary.get(END_THINK)
        if end is not None and end in sampled:
            yield sampled.index(end) + 1
        elif think is not None and (think in sampled or _last(prompt, think) > _last(prompt, end)):
            yield len(sampled)

    def _walker(self, kind: str, text: str, ends: set[int]) -> _Walker:
        if kind == "json" and any(map(_is_for_guidance, _objects(json.loads(text)))):
            return self._guided(text)
        compiled = self._compiled(kind, text)
        return _XgrammarWalker(compiled, ends, self._num_ids)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model)

    @functools.cached_property
    def _num_ids(self) -> int:
        from transformers import AutoConfig

        return int(AutoConfig.from_pretrained(self._model).get_text_config().vocab_size)

    @functools.cached_property
    def _compiler(self) -> Any:
        import xgrammar

        return xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._num_ids)
        )

    def _compiled(self, kind: str, text: str) -> Any:
        compilers: dict[str, Callable[[str], Any]] = {
            "json": self._compiler.compile_json_schema,
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
            "lark": self._compiler.compile_lark,
        }
        try:
            return compilers[kind](text)
        except RuntimeError as error:
            raise NotReplayed(f"xgrammar does not compile the {kind}: {error}") from error

    def _guided(self, schema: str) -> _Walker:
        import llguidance

        if any("patternProperties" in each for each in _objects(json.loads(schema))):
            raise NotReplayed("the engine uses a third library for this schema")
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": True})
        return _GuidanceWalker(llguidance.LLMatcher(self._guidance_tokenizer, grammar), self._guidance_tokenizer)

    @functools.cached_property
    def _guidance_tokenizer(self) -> Any:
        import llguidance.hf

        return llguidance.hf.from_tokenizer(self._tokenizer, max(self._num_ids, len(self._tokenizer)))


def grammar_of(sampling: Json) -> tuple[str, str]:
    """Return kind and text of the grammar that a call's parameters ask for.

    Raises:
        NotReplayed: It is of another kind.
    """
    wanted = sampling.get("response_format") or {}
    kind = wanted.get("type", "text")
    if kind == "json_object":
        return "json", ANY_OBJECT
    if kind == "json_schema":
        return "json", json.dumps(wanted["json_schema"].get("schema"))
    given = {name: value for name, value in (sampling.get("structured_outputs") or {}).items() if value is not None}
    if kind != "text" or len(given) != 1:
        raise NotReplayed(f"response_format {kind!r}, structured_outputs {sorted(given)}")
    (name, value), *_ = given.items()
    if name == "json":
        return "json", value if isinstance(value, str) else json.dumps(value)
    if name == "json_object":
        return "json", ANY_OBJECT
    if name == "regex":
        return "regex", value
    if name == "choice":
        return "ebnf", "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
    if name == "grammar":
        is_ebnf = any("::=" in _COMMENT.sub("", line) for line in value.split("\n"))
        return ("ebnf" if is_ebnf else "lark"), value
    raise NotReplayed(f"structured_outputs {name!r}")


def _walked(walker: _Walker, sampled: Sequence[int], start: int) -> GrammarMasks | None:
    """Return the masks of a walk from a place of the reply on; None if it refuses a token."""
    known: dict[bytes, int] = {}
    index = np.full(len(sampled), -1, np.int64)
    for place in range(start, len(sampled)):
        mask = walker.mask()
        if mask is None:
            break
        index[place] = known.setdefault(mask, len(known))
        if not walker.accept(sampled[place]):
            return None
    masks = [np.frombuffer(mask, np.int32) for mask in known]
    every = np.full(len(masks[0]) if masks else 0, -1, np.int32)
    return GrammarMasks(words=np.stack([*masks, every]), index=index % (len(masks) + 1))


class _XgrammarWalker:
    def __init__(self, compiled: Any, ends: set[int], num_ids: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(ends) or None)
        self._bits = xgrammar.allocate_token_bitmask(1, num_ids)

    def mask(self) -> bytes | None:
        if self._matcher.is_terminated():
            return None
        self._matcher.fill_next_token_bitmask(self._bits)
        return bytes(self._bits.numpy().tobytes())

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))


class _GuidanceWalker:
    def __init__(self, matcher: Any, tokenizer: Any) -> None:
        import llguidance.numpy

        self._matcher = matcher
        self._end = tokenizer.eos_token
        self._is_over = False
        self._bits = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)

    def mask(self) -> bytes | None:
        import llguidance.numpy

        if self._is_over:
            return None
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        return bytes(self._bits.tobytes())

    def accept(self, token: int) -> bool:
        self._is_over |= token == self._end
        return self._matcher.is_stopped() or bool(self._matcher.consume_token(token))


def _last(ids: Sequence[int], wanted: int | None) -> int:
    return max((place for place, each in enumerate(ids) if each == wanted), default=-1)


def _objects(schema: Any) -> Iterator[Json]:
    """Yield a schema's objects, also those that only hold others."""
    if isinstance(schema, dict):
        yield schema
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _objects(each)


def _is_for_guidance(node: Json) -> bool:
    """Return whether vLLM takes an object of a schema for one that xgrammar cannot express."""
    given = node.get("type")
    kinds = {given} if isinstance(given, str) else {one for one in given or () if isinstance(one, str)}
    patterns, names = node.get("patternProperties"), node.get("propertyNames")
    reasons = (
        bool(kinds & {"integer", "number"}) and "multipleOf" in node,
        "array" in kinds and not node.keys().isdisjoint({"uniqueItems", "contains", "minContains", "maxContains"}),
        "string" in kinds and (node.get("format", "date") not in FORMATS or _is_bounded_pattern(node)),
        "object" in kinds and isinstance(patterns, dict) and ("properties" in node or len(patterns) > 1),
        "object" in kinds and names is not None and _names_need_guidance(node, names),
        isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1,
    )
    return any(reasons)


def _names_need_guidance(node: Json, names: Any) -> bool:
    has_others = not node.keys().isdisjoint({"patternProperties", "properties"})
    bounds = isinstance(names, dict) and _is_bounded_pattern(names)
    return bounds or has_others or node.get("unevaluatedProperties", True) is not True


def _is_bounded_pattern(node: Json) -> bool:
    return not (node.keys().isdisjoint({"pattern", "format"}) or node.keys().isdisjoint({"minLength", "maxLength"}))
