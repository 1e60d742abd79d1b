"""Which tokens a grammar allowed at each sampled token of a turn, and from which token on, by walking it again.

The engine walks a grammar token by token and masks the logits; the same walk over the stored tokens gives the same
masks. vLLM 0.32 uses xgrammar, unless a schema needs more than that (vllm/sampling_params.py:
_validate_structured_outputs). Then the library depends on which one a request of the same engine needed first
(vllm/v1/structured_output), so such a schema is not replayed. With a reasoning parser, the grammar begins behind the
token that ends the thinking. A walk that refuses a sampled token shows that the engine used another grammar. A client
writes the grammar, so each is compiled first in a process that the kernel ends after some seconds of CPU time, and a
walk that takes too long, or has too many masks, is given up. Legend: R sampled tokens of a turn, G distinct masks of
it, W words of 32 ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import re
import resource
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import cachetools
import numpy as np
import numpy.typing as npt

from turnwise.sampling import GRAMMAR_BACKEND, GRAMMAR_IS_COMPACT, TOOL_GRAMMAR
from turnwise.types import Json

ANY_OBJECT = '{"type": "object"}'
THINK, END_THINK = "<think>", "</think>"
FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"}
    | {"uri-template", "json-pointer", "relative-json-pointer"}
)
"""Formats of strings that vLLM leaves to xgrammar."""
NOT_OF_XGRAMMAR = frozenset(
    {"multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "patternProperties"}
)
"""Words of a schema that vLLM leaves to another library, most of them in certain places only."""
COMPILE_CPU_SECONDS, COMPILE_SECONDS = 3, 120.0
"""Most CPU time of a grammar's compilation, and when a process that does nothing is ended."""
COMPILE_BYTES = 2 * 2**30
"""Memory that a compilation may add to the process."""
WALK_CPU_SECONDS = 10.0
MASK_BYTES = 256 * 2**20
"""Most bytes of the distinct masks of one turn."""
MAX_VERDICTS = 4096
SMALL_CHARACTERS = 256
"""A grammar that is no longer, and repeats nothing a number of times, is compiled at once."""
_COUNTED = re.compile(r"\d\d|\{ *\d|\d *\}")
_COMMENT = re.compile(r"(#|//).*$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMasks:
    """What a grammar allowed."""

    words: npt.NDArray[np.int32]
    """Masks, a bit for each id, from the lowest bit on; the last one allows all. [G + 1, W]"""
    index: npt.NDArray[np.int64]
    """The mask of each token. [R]"""

    def allows_nothing_but(self, ids: Collection[int]) -> npt.NDArray[np.bool_]:
        """Return for each token whether no other ids were allowed there; looks once at each distinct mask. [R]."""
        others = np.ones(32 * self.words.shape[1], np.bool_)
        others[[each for each in ids if each < len(others)]] = False
        has_others = np.any(self.words & np.packbits(others, bitorder="little").view(np.int32), axis=1)
        return ~np.asarray(has_others, np.bool_)[self.index]


class NotReplayed(Exception):
    """A turn's grammar is unknown, or another one than the engine's."""


class Grammars:
    """The grammars of a model's vocabulary."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._is_compiled_in_time: cachetools.LRUCache[tuple[str, str, bool], bool] = cachetools.LRUCache(MAX_VERDICTS)

    def masks(self, sampling: Json, prompt: Sequence[int], sampled: Sequence[int], ends: set[int]) -> GrammarMasks:
        """Return what the grammar of a call's parameters allowed at each sampled token; `ends` end a reply.

        Raises:
            NotReplayed: The grammar is unknown, or refuses a sampled token.
        """
        kind, text = grammar_of(sampling)
        if kind == "json" and not sampling.get(GRAMMAR_BACKEND) and any(map(_needs_more, _objects(json.loads(text)))):
            raise NotReplayed("the engine may use another library for this schema")
        compiled = self._compiled(kind, text, is_compact=bool(sampling.get(GRAMMAR_IS_COMPACT)))
        for start in self._starts(prompt, sampled):
            found = self._walked(compiled, sampled, start, ends)
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

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model)

    @functools.cached_property
    def num_ids(self) -> int:
        from transformers import AutoConfig

        return int(AutoConfig.from_pretrained(self._model).get_text_config().vocab_size)

    @functools.cached_property
    def _compiler(self) -> Any:
        import xgrammar

        return xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self.num_ids),
            cache_limit_bytes=MASK_BYTES,
        )

    def _walked(self, compiled: Any, sampled: Sequence[int], start: int, ends: set[int]) -> GrammarMasks | None:
        """Return the masks of a walk from a place of the reply on; None if it refuses a token."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(ends) or None)
        bits = xgrammar.allocate_token_bitmask(1, self.num_ids)
        known: dict[bytes, int] = {}
        index = np.full(len(sampled), -1, np.int64)
        since, most_masks = time.thread_time(), MASK_BYTES // (bits.shape[1] * 4)
        for place in range(start, len(sampled)):
            if matcher.is_terminated():
                break
            if len(known) > most_masks or time.thread_time() - since > WALK_CPU_SECONDS:
                raise NotReplayed(f"its masks take more than {WALK_CPU_SECONDS:g} s or {MASK_BYTES} bytes")
            matcher.fill_next_token_bitmask(bits)
            index[place] = known.setdefault(bits.numpy().tobytes(), len(known))
            if not matcher.accept_token(sampled[place]):
                return None
        every = np.full(bits.shape[1], -1, np.int32)
        words = np.stack([*(np.frombuffer(mask, np.int32) for mask in known), every])
        return GrammarMasks(words=words, index=index % len(words))

    def _compiled(self, kind: str, text: str, *, is_compact: bool) -> Any:
        spaces = {"any_whitespace": False, "separators": (",", ":")} if is_compact else {}
        compilers: dict[str, Callable[[str], Any]] = {
            "json": functools.partial(self._compiler.compile_json_schema, **spaces),
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
            "lark": self._compiler.compile_lark,
        }
        compile_it = functools.partial(compilers[kind], text)
        key, is_small = (kind, text, is_compact), len(text) <= SMALL_CHARACTERS and not _COUNTED.search(text)
        if not is_small and key not in self._is_compiled_in_time:
            self._is_compiled_in_time[key] = ends_in_time(compile_it)
        if not is_small and not self._is_compiled_in_time[key]:
            raise NotReplayed(
                f"xgrammar needs more than {COMPILE_CPU_SECONDS} s or {COMPILE_BYTES} bytes for the {kind}"
            )
        try:
            return compile_it()
        except RuntimeError as error:
            raise NotReplayed(f"xgrammar does not compile the {kind}: {error}") from error


def ends_in_time(function: Callable[[], object]) -> bool:
    """Return whether a function ends within the limits of a compilation, in a fork of this process."""
    child = multiprocessing.get_context("fork").Process(target=_call_limited, args=(function,), daemon=True)
    child.start()
    child.join(COMPILE_SECONDS)
    if child.exitcode is None:
        child.kill()
        child.join()
    has_ended = child.exitcode == 0
    child.close()
    return has_ended


def _call_limited(function: Callable[[], object]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_CPU_SECONDS, COMPILE_CPU_SECONDS))
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + COMPILE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # said where it is compiled again
        function()


def grammar_of(sampling: Json) -> tuple[str, str]:
    """Return kind and text of the grammar that a call's parameters ask for.

    Raises:
        NotReplayed: It is of another kind.
    """
    if isinstance(sampling.get(TOOL_GRAMMAR), dict):  # vLLM puts it in the place of any other
        return "json", json.dumps(sampling[TOOL_GRAMMAR])
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


def _last(ids: Sequence[int], wanted: int | None) -> int:
    return max((place for place, each in enumerate(ids) if each == wanted), default=-1)


def _objects(schema: Any) -> Iterator[Json]:
    """Yield a schema's objects, also those that only hold others."""
    if isinstance(schema, dict):
        yield schema
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _objects(each)


def _needs_more(node: Json) -> bool:
    """Return whether vLLM may take an object of a schema for one that xgrammar cannot express."""
    is_bounded = not node.keys().isdisjoint({"minLength", "maxLength"})
    is_pattern = not node.keys().isdisjoint({"pattern", "format"})
    of_parts = node.get("allOf")
    return (
        not node.keys().isdisjoint(NOT_OF_XGRAMMAR)
        or (is_bounded and is_pattern)
        or str(node.get("format", "date")) not in FORMATS
        or (isinstance(of_parts, list) and len(of_parts) > 1)
    )
