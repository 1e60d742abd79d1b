"""Imported conversations as turns: replies tokenised by the served model's template, or token ids of the file.

The prompt of a reply is what the template renders for it, so its tokens are those that the engine would be given. Where
that prompt begins with the tokens of the reply before it, the turn extends that turn; otherwise it starts a chain.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import httpx2
import numpy as np

from turnwise.chains import IMPORTED, NO_POLICY
from turnwise.errors import BadLine, EngineUnavailable, EngineUnsuitable
from turnwise.exchange.imports.drafts import ImportedConversation, SampledTokens
from turnwise.exchange.imports.sentinels import call_arguments, mark_prompt, mark_reply
from turnwise.tokenizer import ContentFormat, load_tokenizer, shape_conversation
from turnwise.types import Json, Outcome, Turn, utc_now


@dataclasses.dataclass(frozen=True, slots=True)
class _Reply:
    """A turn with what its children need of it."""

    turn: Turn
    tokens: list[int]
    text: str | None
    end: str
    num_messages: int


class Tokeniser:
    """Tokenises conversations as the engine does."""

    def __init__(self, path: str, arguments: Json | None = None) -> None:
        """Load the tokenizer of a directory or of an id in the local Hugging Face cache.

        `arguments` are those of the chat template, as `chat_template_kwargs` of a call.

        Raises:
            OSError, ValueError: there is no such tokenizer.
        """
        self._tokenizer, end_tokens = load_tokenizer(path)
        self._num_ids = len(self._tokenizer)
        self._ends = {self._tokenizer.decode([token], skip_special_tokens=False): token for token in end_tokens}
        self.arguments = arguments or {}
        self.content_format: ContentFormat = "string"
        self.num_unended = 0
        """Replies after which the template has no end token of the model: what it has instead is trained."""
        self.num_without_tools = 0
        """Replies in whose prompt the template leaves out a result or a schema of a tool."""

    def prompt_ids(self, messages: Sequence[Json], tools: Sequence[Json] | None) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            BadLine: the template refuses the messages.
        """
        return self._encode(self._render(messages, tools, generate=True))

    def turns(self, session_id: str, tenant: str, conversations: Sequence[ImportedConversation]) -> list[Turn]:
        """Return the turns of a session, parents before children; equal beginnings of conversations are shared.

        Raises:
            BadLine: a reply cannot be tokenised, or its token ids are not of this tokenizer.
        """
        replies: dict[bytes, _Reply] = {}
        # Logs are not always in order; a reply comes before the calls whose prompts repeat it.
        for conversation in sorted(conversations, key=lambda each: min(each.trained)):
            last: _Reply | None = None
            digest = hashlib.sha256(json.dumps(conversation.tools).encode())
            for index, message in enumerate(conversation.messages):
                digest.update(json.dumps({name: value for name, value in message.items() if value}).encode() + b"\n")
                key = digest.digest()
                if index in conversation.trained and key not in replies:
                    name = f"{session_id}-t{len(replies)}"
                    replies[key] = self._reply(conversation, index, last, name, session_id, tenant)
                last = replies.get(key, last)
        return [reply.turn for reply in replies.values()]

    def _reply(
        self,
        conversation: ImportedConversation,
        index: int,
        last: _Reply | None,
        name: str,
        session_id: str,
        tenant: str,
    ) -> _Reply:
        sampled = conversation.sampled.get(index)
        if sampled is not None:
            parent, delta, ids = self._from_file(sampled, conversation.messages[index], last)
            text, end = None, ""
        else:
            parent, delta, ids, text, end = self._from_text(conversation, index, last)
        before = [] if parent is None else parent.tokens
        if not before and not delta:
            raise BadLine(f"the template renders no prompt before message {index + 1}")
        turn = Turn(
            turn_id=name,
            session_id=session_id,
            tenant=tenant,
            parent_turn_id=None if parent is None else parent.turn.turn_id,
            chain_id=name if parent is None else parent.turn.chain_id,
            model=conversation.model,
            messages=conversation.messages[0 if parent is None else parent.num_messages : index],
            tools=conversation.tools if parent is None else None,
            response=conversation.messages[index],
            prompt_delta=np.array(delta, np.int32),
            prompt_length=len(before) + len(delta),
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(sampled.logprobs if sampled else [], np.float32),
            finish_reason="tool_calls" if conversation.messages[index].get("tool_calls") else "stop",
            outcome=Outcome.UNTRAINABLE,
            reason=IMPORTED,
            policy_version_first=NO_POLICY,
            policy_version_last=NO_POLICY,
            created_at=conversation.created_at.get(index) or utc_now(),
        )
        return _Reply(turn, [*before, *delta, *ids], text, end, index + 1)

    def _from_file(
        self, sampled: SampledTokens, message: Json, last: _Reply | None
    ) -> tuple[_Reply | None, list[int], list[int]]:
        self._check_ids(sampled, message)
        prompt = sampled.prompt_token_ids
        if last is not None and prompt[: len(last.tokens)] == last.tokens:
            return last, prompt[len(last.tokens) :], sampled.token_ids
        return None, prompt, sampled.token_ids

    def _from_text(
        self, conversation: ImportedConversation, index: int, last: _Reply | None
    ) -> tuple[_Reply | None, list[int], list[int], str, str]:
        """Return the turn that is extended, the tokens after it, the reply's, the text of both, and the end's."""
        messages, tools = conversation.messages, conversation.tools
        _check_answers(conversation, index)
        marked = mark_reply(messages[index])
        if not marked.texts:
            raise BadLine(f"message {index + 1} is an empty reply")
        prompt = self._render(messages[:index], tools, generate=True)
        whole = self._after(prompt, messages[: index + 1], tools)
        before = mark_prompt(messages[:index], tools or ())
        rendered = self._render([*before.messages, marked.message], before.tools, generate=False)
        try:
            lacks_tools = before.leaves_tools_out(rendered)
            end, tail = marked.end_in(rendered, self._ends)
            reply = self._cut_at_end(whole, end, tail, messages[index])
        except BadLine as error:
            raise BadLine(f"message {index + 1} cannot be trained: {error}") from error
        self.num_unended += not end
        self.num_without_tools += lacks_tools
        parent = last if last is not None and last.text is not None and prompt.startswith(last.text) else None
        added = prompt if parent is None or parent.text is None else prompt[len(parent.text) :]
        delta, ids = self._encode_after("" if parent is None else parent.end, added, reply)
        return parent, delta, ids, prompt + reply, end

    def _after(self, prompt: str, messages: Sequence[Json], tools: Sequence[Json] | None) -> str:
        """Return what the template renders after the prompt of the last message."""
        whole = self._render(messages, tools, generate=False)
        if not whole.startswith(prompt):
            raise BadLine(
                f"the template does not render message {len(messages)} after its own generation prompt; try other "
                "--template-arguments"
            )
        return whole[len(prompt) :]

    def _cut_at_end(self, text: str, end: str, tail: str, message: Json) -> str:
        """Return a rendered reply up to its end token; the tail that begins there is the template's."""
        if missing := _missing(text, message):
            raise BadLine(f"the template leaves {missing!r:.60} out of the reply")
        said = text.removesuffix(tail)
        inside = next((one for one in self._ends if one in said), None)
        if inside is not None or len(said) + len(tail) != len(text):
            raise BadLine(f"it has {inside or end!r}, which ends a reply of the model, before its end")
        return said + end

    def _encode_after(self, end: str, added: str, reply: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt's text after an end token, and of the reply after it.

        Some tokenizers treat the start of a text differently, so texts are tokenised after what they follow.
        """
        prompt = self._encode(end + added)
        whole = self._encode(end + added + reply)
        ids = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self._encode(reply)
        if end and prompt[:1] == [self._ends[end]]:
            return prompt[1:], ids
        return (self._encode(added) if end else prompt), ids

    def _check_ids(self, sampled: SampledTokens, message: Json) -> None:
        if max(*sampled.prompt_token_ids, *sampled.token_ids) >= self._num_ids:
            raise BadLine(f"its token ids are not of this tokenizer, which has {self._num_ids}")
        decoded = self._tokenizer.decode(sampled.token_ids, skip_special_tokens=False)
        if missing := _missing(decoded, message, with_reasoning=False):
            raise BadLine(f"its completion_token_ids are not of this tokenizer: {missing!r:.60} is not their text")

    def _render(self, messages: Sequence[Json], tools: Sequence[Json] | None, *, generate: bool) -> str:
        has_developer = "developer" in str(self._tokenizer.chat_template)
        arguments = {**self.arguments, "add_generation_prompt": generate}
        try:
            conversation = shape_conversation(messages, self.content_format, has_developer=has_developer)
            text = self._tokenizer.apply_chat_template(conversation, tools=tools or None, tokenize=False, **arguments)
        except Exception as error:
            raise BadLine(f"the chat template refuses its messages: {type(error).__name__}: {error}") from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        ids: Any = self._tokenizer.encode(text, add_special_tokens=False)
        return list(ids)


def _texts_of(message: Json, *, with_reasoning: bool = True) -> list[str]:
    """Return the texts that a rendered reply must have."""
    content = message.get("content") or ""
    whole = [content] if isinstance(content, str) else content
    parts = [part if isinstance(part, str) else part["text"] for part in whole]
    calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
    return [*parts, *calls, message.get("reasoning") or "" if with_reasoning else ""]


def _missing(text: str, message: Json, *, with_reasoning: bool = True) -> str | None:
    """Return a text of a reply that is not in what was rendered or decoded, white space aside; None without one."""
    found = "".join(text.split())
    texts = _texts_of(message, with_reasoning=with_reasoning)
    return next((one for one in texts if "".join(one.split()) not in found), None)


def _check_answers(conversation: ImportedConversation, index: int) -> None:
    """Check what comes before a reply: no beginning of it, arguments that can be rendered, and the tools it calls."""
    messages = conversation.messages
    if index and messages[index - 1]["role"] == "assistant":
        raise BadLine(
            f"message {index + 1} follows the assistant's message {index}: a beginning that was given to the model is "
            "no reply of its own; put both into one message, or leave the line out"
        )
    for call in (call for message in messages[: index + 1] for call in message.get("tool_calls") or []):
        call_arguments(call)
    offered = {tool["function"]["name"] for tool in conversation.tools or []}
    for call in messages[index].get("tool_calls") or []:
        if (name := call["function"]["name"]) not in offered:
            raise BadLine(
                f"message {index + 1} calls {name!r:.60}, which its tools do not offer: {', '.join(offered) or 'none'}"
            )


TIMEOUT_SECONDS = 60.0
FORMATS: tuple[ContentFormat, ...] = ("string", "openai")
USER: Json = {"role": "user", "content": "What is 2 + 2?"}
CONVERSATIONS: tuple[list[Json], ...] = (
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}],
)


def use_engines_template(tokeniser: Tokeniser, engine_url: str) -> None:
    """Choose how contents are rendered, so that prompts have the tokens that the engine gives them.

    Raises:
        EngineUnavailable: the engine does not answer.
        EngineUnsuitable: it tokenises a conversation differently.
    """
    served = [_served_ids(engine_url.rstrip("/"), messages, tokeniser.arguments) for messages in CONVERSATIONS]
    for content_format in FORMATS:
        tokeniser.content_format = content_format
        if [_own_ids(tokeniser, messages) for messages in CONVERSATIONS] == served:
            return
    raise EngineUnsuitable(
        f"the engine at {engine_url} tokenises conversations differently from this tokenizer; name the served model's "
        "own directory by --tokenizer, and its arguments by --template-arguments"
    )


def _own_ids(tokeniser: Tokeniser, messages: list[Json]) -> list[int] | None:
    try:
        return tokeniser.prompt_ids(messages, None)
    except BadLine:
        return None


def _served_ids(engine_url: str, messages: list[Json], arguments: Json) -> list[int] | None:
    """Return the tokens that the engine gives a conversation; None where its template refuses it."""
    body: Json = {"messages": messages, "add_generation_prompt": True}
    if arguments:
        body["chat_template_kwargs"] = arguments
    try:
        response = httpx2.post(f"{engine_url}/tokenize", json=body, timeout=TIMEOUT_SECONDS)
    except httpx2.HTTPError as error:
        raise EngineUnavailable(
            f"the engine at {engine_url} cannot be reached ({type(error).__name__}: {error}); check the URL"
        ) from error
    if response.status_code == 400:
        return None
    if response.status_code != 200:
        raise EngineUnavailable(f"the engine at {engine_url} answered {response.status_code} to POST /tokenize")
    ids: list[int] = response.json()["tokens"]
    return ids
