"""Results of a template's checks, kept beside its tokenizer.

The checks render probes for half a second of CPU at each start. Their result depends on the tokenizer's files, whose
digest names the directory, and on the code that checks, whose digest is in the name of the file.
"""

from __future__ import annotations

import functools
import json
import logging
from hashlib import blake2b
from pathlib import Path
from typing import Any

from proxy.continuation.template import ChatTemplate
from turnwise import tokenizer as tokenizers
from turnwise.files import write_whole
from turnwise.tokenizer import ContentFormat, KeptTokenizer, load_tokenizer

log = logging.getLogger(__name__)


def load_chat_template(path: str, content_format: ContentFormat) -> ChatTemplate:
    """Load a tokenizer and its template from a directory, or by its id from the local Hugging Face cache.

    Raises:
        OSError, ValueError: there is no such tokenizer, as transformers raises it.
    """
    tokenizer, end_tokens = load_tokenizer(path)
    template = ChatTemplate(tokenizer, end_tokens, content_format)
    file = _result_file(tokenizer, content_format)
    if file is None or not file.exists():
        template.shorten_if_alike()
        if file is not None:
            _keep(file, template.shortens_tools)
        return template
    shortens_tools: bool | None = json.loads(file.read_text(encoding="utf-8"))
    if shortens_tools is not None:
        template.shorten(tools=shortens_tools)
    return template


def _result_file(tokenizer: Any, content_format: ContentFormat) -> Path | None:
    if not isinstance(tokenizer, KeptTokenizer):
        return None
    return tokenizer.directory / f"checks-{content_format}-{_code_digest()}.json"


@functools.cache
def _code_digest() -> str:
    """Return the digest of the code that the checks run."""
    digest = blake2b(digest_size=8)
    here = sorted(Path(__file__).parent.glob("*.py"))
    for file in [*here, Path(tokenizers.__file__)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _keep(file: Path, shortens_tools: bool | None) -> None:
    try:
        write_whole(file, json.dumps(shortens_tools))
    except OSError as error:
        log.warning(
            "the checks of a chat template cannot be kept in %s and are repeated at each start: %s", file, error
        )
