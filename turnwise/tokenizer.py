"""A model's tokenizer and chat template, kept so that transformers is not imported; messages as vLLM shapes them.

transformers takes 1.5 s of CPU to import. So what it loaded is kept in a directory that is named by the digest of the
model's files: later processes read it with `tokenizers` and `jinja2` alone, which transformers uses for the same work.
Messages are shaped as vLLM passes them to the template, so that a rendered conversation is the engine's.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from turnwise.types import Json

log = logging.getLogger(__name__)

LIBRARIES = ("transformers", "tokenizers", "jinja2")
SUFFIXES = (".json", ".jinja", ".txt", ".model")
MAX_FILE_BYTES = 2**27
"""Larger files are weights."""
RECORD, BACKEND = "record.json", "tokenizer.json"


ContentFormat = Literal["string", "openai"]
"""How a template reads a message's content: as one text, or as a list of parts."""


class KeptTokenizer:
    """What transformers loaded: it renders, encodes and decodes as the tokenizer there."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        record: Json = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        self.directory = directory
        """Where it is kept; checks of it are kept there too."""
        self.chat_template: str = record["chat_template"]
        self.all_special_tokens: list[str] = record["all_special_tokens"]
        self.end_tokens: list[int] = record["end_tokens"]
        self._special_tokens: Mapping[str, str] = record["special_tokens"]
        self._backend = Tokenizer.from_file(str(directory / BACKEND))
        self._backend.no_truncation()
        self._backend.no_padding()

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size())

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._backend.get_vocab()
        return vocabulary

    def apply_chat_template(
        self,
        conversation: Sequence[Json],
        *,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **arguments: Any,
    ) -> str:
        """Render a conversation as text.

        Raises:
            ValueError: the conversation is empty, or the ids are asked for.
            jinja2.TemplateError: the template refuses the conversation.
        """
        if not conversation or tokenize:
            raise ValueError("give at least one message, and tokenize=False")
        return _compiled(chat_template or self.chat_template).render(
            messages=conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **arguments},
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def load_tokenizer(path: str) -> tuple[Any, list[int]]:
    """Load a tokenizer from a directory, or by its id from the local Hugging Face cache; return its end tokens too.

    Raises:
        OSError, ValueError: there is no such tokenizer, as transformers raises it.
    """
    kept = _place(path)
    if kept is not None and kept.is_dir():
        tokenizer = KeptTokenizer(kept)
        return tokenizer, tokenizer.end_tokens
    loaded, end_tokens = _load_with_transformers(path)
    if kept is None or not _keep(loaded, end_tokens, kept):
        return loaded, end_tokens
    return KeptTokenizer(kept), end_tokens


def _load_with_transformers(path: str) -> tuple[Any, list[int]]:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(path)
    ends = {tokenizer.eos_token_id}
    if not Path(path).is_dir() or Path(path, "generation_config.json").is_file():
        configured = GenerationConfig.from_pretrained(path).eos_token_id
        ends.update(configured if isinstance(configured, list) else [configured])
    return tokenizer, sorted(end for end in ends if end is not None)


def _place(path: str) -> Path | None:
    """Return the directory in which the tokenizer of these files is kept; None if it cannot be kept."""
    source = Path(path)
    if not source.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(path, "tokenizer_config.json")
        except ValueError:  # neither a directory nor an id
            return None
        if not isinstance(found, str):
            return None
        source = Path(found).parent
    digest = blake2b(digest_size=16)
    for library in LIBRARIES:
        digest.update(f"{library} {importlib.metadata.version(library)}\n".encode())
    try:
        for file in sorted(source.rglob("*")):
            if file.suffix in SUFFIXES and file.is_file() and file.stat().st_size <= MAX_FILE_BYTES:
                content = file.read_bytes()
                digest.update(f"{file.relative_to(source)} {len(content)}\n".encode())
                digest.update(content)
        return Path.home() / ".cache" / "turnwise" / "tokenizers" / digest.hexdigest()
    except (OSError, RuntimeError) as error:
        log.warning("the tokenizer of %r is loaded by transformers at each start: %s", path, error)
        return None


def _keep(tokenizer: Any, end_tokens: list[int], kept: Path) -> bool:
    if not _works_in_the_usual_way(tokenizer):
        return False
    record = {
        "chat_template": tokenizer.chat_template,
        "special_tokens": tokenizer.special_tokens_map,
        "all_special_tokens": tokenizer.all_special_tokens,
        "end_tokens": end_tokens,
    }
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".writing-", dir=kept.parent))
        try:
            (staging / RECORD).write_text(json.dumps(record), encoding="utf-8")
            tokenizer.backend_tokenizer.save(str(staging / BACKEND))
            staging.rename(kept)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        if not kept.is_dir():  # another process may have kept it at the same time
            log.warning("a tokenizer cannot be kept in %s, so transformers loads it at each start: %s", kept, error)
            return False
    return True


def _works_in_the_usual_way(tokenizer: Any) -> bool:
    """Return whether a tokenizer's class overrides nothing that `KeptTokenizer` does in its place."""
    from transformers import PreTrainedTokenizerFast

    methods = ("encode", "_encode_plus", "decode", "_decode", "apply_chat_template", "get_chat_template")
    if not all(getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name) for name in methods):
        return False
    return isinstance(tokenizer.chat_template, str) and not _cleans_up(tokenizer)


def _cleans_up(tokenizer: Any) -> bool:
    if type(tokenizer.backend_tokenizer.model).__name__ == "BPE":
        return bool(tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output)
    return bool(tokenizer.clean_up_tokenization_spaces)


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)  # noqa: DTZ005
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def shape_conversation(messages: Sequence[Json], content_format: ContentFormat, *, has_developer: bool) -> list[Json]:
    """Return a conversation as vLLM passes it to the template.

    For a template that does not know the role `developer`, such messages become system messages.

    Raises:
        ValueError: a content is neither text nor a list of parts.
    """
    conversation = [_shape_message(message, content_format) for message in messages]
    if has_developer or not any(message["role"] == "developer" for message in conversation):
        return conversation
    return _merge_system(conversation)


def _shape_message(message: Json, content_format: ContentFormat) -> Json:
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise ValueError(f"content {content!r:.80} is neither text nor a list of parts")  # noqa: TRY004  as documented
    parts: list[Any] = [content] if isinstance(content, str) else [_part_text(part) for part in content or []]
    shaped: Json = {"role": message.get("role")}
    if None in parts:
        shaped["content"] = _shape_images(parts, content_format)
    elif content_format == "openai" and shaped["role"] != "tool":
        shaped["content"] = [{"type": "text", "text": text} for text in parts]
    else:
        shaped["content"] = "\n".join(parts)
    for field in ("name", "tool_call_id"):
        if isinstance(message.get(field), str):
            shaped[field] = message[field]
    if message.get("role") == "assistant":
        if calls := message.get("tool_calls"):
            shaped["tool_calls"] = [_call_with_parsed_arguments(call) for call in calls]
        thinking = message.get("reasoning", message.get("reasoning_content"))
        if thinking is not None:
            shaped["reasoning"] = shaped["reasoning_content"] = thinking
    return shaped


def _shape_images(parts: Sequence[str | None], content_format: ContentFormat) -> list[Json]:
    if content_format == "string":
        raise ValueError("where an image stands in a text depends on the model")
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in parts]


def _part_text(part: Any) -> str | None:
    """Return the text of a part; None for an image."""
    return None if isinstance(part, dict) and part.get("type") == "image_url" else text_of_part(part)


def text_of_part(part: Any) -> str:
    """Return the text of a part of a content, which may be a text itself."""
    if isinstance(part, dict):
        return str(part.get("text") or part.get("refusal") or part.get("thinking") or "")
    return str(part)


def _call_with_parsed_arguments(call: Json) -> Json:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


def _merge_system(conversation: list[Json]) -> list[Json]:
    """Turn developer messages into one system message at the front, as vLLM does for templates that know none."""
    system = [m for m in conversation if m["role"] in ("developer", "system")]
    texts = [
        m["content"] if isinstance(m["content"], str) else "\n".join(part["text"] for part in m["content"])
        for m in system
    ]
    first = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [first, *(m for m in conversation if m["role"] not in ("developer", "system"))]
