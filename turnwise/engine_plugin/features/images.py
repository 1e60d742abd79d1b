"""Images on vLLM's chat route: given ids, each image's place, and a repeated call where a load emptied its caches.

vLLM ignores given ids in a call with images, and renders its messages again. Here a request names `FIELD` among its
template arguments: `ids` are the prompt, `ranges` are offset and length of each image's placeholder that `ids` have
already, and the targets of the other images are searched from place `first` on, where nothing was sampled. A stored
placeholder must be what the processor would put there now; else the call is refused before sampling, with
`RERENDERED`. Without ids vLLM renders the messages and searches them for placeholders, so a text that has one would
move an image there: such a call is refused, with `TYPED`. The reply has the places of all images in the same field.

`processor_digest` and `pixels_digest` say what the processor made of the images; the trainer compares them with its
own.
"""

from __future__ import annotations

import base64
import collections
import contextvars
import dataclasses
import functools
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

FIELD = "turnwise_prompt"
"""The template argument of a request, and the field of a reply."""
RERENDERED = "media_rerendered"
"""Begins the refusal of ids in which a placeholder is not what the processor would put there."""
TYPED = "media_placeholder"
"""Begins the refusal of a text that has what stands for an image."""
DIGEST_BYTES = 16
JOINS = ("_get_full_multimodal_text_prompt", "get_full_multimodal_text_prompt")
"""vLLM's function that joins the texts of a message: of 0.32, and of 0.33."""
MOST_TRIES = 4
"""Of a call with images whose engine has lost one of them to a load of weights, while loads follow one another."""
_KEPT_DIGESTS = 4096
"""Images whose pixels' digest is kept: vLLM's cache does not return the pixels of one that it has sent before."""
_LONGEST_REASON = 500
_OF_SIZES = (ValueError, RuntimeError, ZeroDivisionError)
"""What processors raise for sizes that they do not take; a subclass, such as too little memory, says something else."""
_places: contextvars.ContextVar[str | None] = contextvars.ContextVar("places", default=None)
"""Where the images of the request are that this task answers."""


def register() -> None:
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.processing import processor
    from vllm.multimodal.processing.context import InputProcessingContext
    from vllm.renderers import chat_utils, hf, params

    accept_ids_with_images(hf.HfRenderer, params.TokenizeParams, processor)
    refuse_unreadable_files(ImageMediaIO)
    refuse_typed_placeholders(getattr(chat_utils, "chat_message", chat_utils))
    refuse_unfit_images(InputProcessingContext)


class GivenIds(list[int]):
    """A prompt whose placeholders are found by their places, so that a sampled placeholder stays text."""

    ranges: Sequence[Sequence[int]] = ()
    first: int = 0


def accept_ids_with_images(renderer: type[Any], tokenizing: type[Any], processor: ModuleType) -> None:
    """Let vLLM's chat route take ids together with images; `tokenizing` would make a plain list of the ids."""
    begin, render, base = renderer.__init__, renderer.render_messages_async, processor.BaseMultiModalProcessor
    process, put, validate = (
        base._cached_apply_hf_processor,  # noqa: SLF001  vLLM has no hook
        base._maybe_apply_prompt_updates,  # noqa: SLF001
        tokenizing._validate_tokens,  # noqa: SLF001
    )

    @functools.wraps(begin)
    def begin_with_places(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        _show_in_replies()

    async def render_given(self: Any, messages: Any, params: Any) -> Any:
        arguments = params.chat_template_kwargs or {}
        given = arguments.get(FIELD)
        if given is None:
            return await render(self, messages, params)
        others = {name: value for name, value in arguments.items() if name != FIELD}
        conversation, prompt = await render(self, messages, dataclasses.replace(params, chat_template_kwargs=others))
        if "ids" in given:
            self.validate_token_ids(given["ids"], parameter=FIELD)
            prompt.pop("prompt", None)
            prompt["prompt_token_ids"] = ids = GivenIds(given["ids"])
            ids.ranges, ids.first = given["ranges"], given["first"]
        return conversation, prompt

    def validate_given(self: Any, tokenizer: Any, tokens: Any) -> Any:
        validated = validate(self, tokenizer, tokens)
        return tokens if isinstance(tokens, GivenIds) and len(validated) == len(tokens) else validated

    def process_given(self: Any, inputs: Any, timing: Any) -> Any:
        result = process(self, inputs, timing)
        return result._replace(prompt_ids=inputs.prompt) if isinstance(inputs.prompt, GivenIds) else result

    def put_given(self: Any, mm_items: Any, mm_res: Any) -> Any:
        if not isinstance(mm_res.prompt_ids, GivenIds):
            check_not_typed(self.info.get_tokenizer(), mm_res.prompt_ids, mm_res.prompt_updates.get("image", ()))
            return put(self, mm_items, mm_res)
        counts = mm_items.get_all_counts()
        self._validate_mm_kwargs(mm_res.kwargs, counts)
        self._validate_mm_updates(mm_res.prompt_updates, counts)
        ((modality, updates),) = mm_res.prompt_updates.items()
        ids, found = placed(mm_res.prompt_ids, [each[0] for each in updates])
        make = functools.partial(processor.PlaceholderFeaturesInfo, modality=modality)
        return ids, {modality: [make(**each) for each in found]}

    renderer.__init__ = begin_with_places
    renderer.render_messages_async = render_given
    tokenizing._validate_tokens = validate_given  # noqa: SLF001
    base._cached_apply_hf_processor = process_given  # noqa: SLF001
    base._maybe_apply_prompt_updates = put_given  # noqa: SLF001


def check_not_typed(tokenizer: Any, ids: Sequence[int], updates: Sequence[Any]) -> None:
    """Check that a prompt has one placeholder for each image, as tokens and as text: vLLM takes the first ones.

    Raises:
        VLLMValidationError: it has more, so a text of the messages has one.
    """
    named = [each[0].target for each in updates]
    targets = collections.Counter(tuple(target) for target in named if isinstance(target, list) and target)
    text = tokenizer.decode(ids) if targets else ""
    for target, number in targets.items():
        written = tokenizer.decode(list(target))
        size = len(target)
        tokens = sum(tuple(ids[at : at + size]) == target for at in range(len(ids) - size + 1))
        if max(tokens, text.count(written) if written else 0) > number:
            raise _typed(written)


def refuse_typed_placeholders(chat: Any) -> None:
    """Let vLLM refuse a text that it would take for the place of an image, where it joins the texts of a message."""
    name = next(each for each in JOINS if hasattr(chat, each))
    join = getattr(chat, name)

    @functools.wraps(join)
    def join_or_refuse(storage: Any, texts: list[str], *arguments: Any, **options: Any) -> Any:
        placeholders = [each for held in storage.values() for each in held]
        marks = [text for text in texts if text in storage]
        typed = next((each for each in placeholders if any(each in text for text in texts)), None)
        if typed is not None or len(marks) > len(placeholders):
            raise _typed(typed or marks[-1])
        return join(storage, texts, *arguments, **options)

    setattr(chat, name, join_or_refuse)


def _typed(placeholder: str) -> Exception:
    from vllm.exceptions import VLLMValidationError

    error: Exception = VLLMValidationError(
        f"{TYPED}: a text of the messages has {placeholder!r}, which stands for an image with this model and would "
        "move one there; write it otherwise, or leave it out",
        parameter="messages",
    )
    return error


def refuse_unfit_images(context: type[Any]) -> None:
    """Let vLLM say in a few words, with status 400, why the model's image processor refuses a call's images.

    It answers with all pixels and without the processor's reason.
    """
    call = context.call_hf_processor

    @functools.wraps(call)
    def call_or_refuse(self: Any, hf_processor: Any, data: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(self, hf_processor, data, *arguments, **options)
        except ValueError as error:
            reason = error.__cause__
            if type(reason) not in _OF_SIZES or not data.get("images"):
                raise
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(
                f"the model's image processor refuses an image: {reason}"[:_LONGEST_REASON], parameter="messages"
            ) from reason

    context.call_hf_processor = call_or_refuse


def refuse_unreadable_files(media: type[Any]) -> None:
    """Let vLLM refuse an image that is broken, or has too many pixels, with status 400, and not fail with 500.

    It catches two of the four errors that Pillow raises.
    """
    from PIL import Image

    load = media.load_bytes

    @functools.wraps(load)
    def load_or_refuse(self: Any, data: bytes) -> Any:
        try:
            return load(self, data)
        except (Image.DecompressionBombError, SyntaxError) as error:
            raise ValueError(f"Failed to load image: {error}") from error

    media.load_bytes = load_or_refuse


def placed(given: GivenIds, updates: Sequence[Any]) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the whole prompt, and each image's placeholder in it, from what vLLM would put there for each image.

    Raises:
        VLLMValidationError: a stored placeholder is another one now, or there are not as many targets as new images.
    """
    ids: list[int] = []
    found: list[dict[str, Any]] = []
    end, searched = 0, given.first
    for index, update in enumerate(updates):
        full, target = list(update.content.full), list(update.target)
        if index < len(given.ranges):
            start, length = given.ranges[index]
            if given[start : start + length] != full:
                raise _refused(f"image {index}: {length} ids at {start} are given, the processor puts {len(full)}")
        else:
            at, length = _find(given, target, searched), len(target)
            if at is None:
                raise _refused(f"image {index} has no placeholder from {searched} on")
            start, searched = at, at + length
        ids += given[end:start]
        is_embed = None if update.content.is_embed is None else update.content.is_embed(full)
        found.append({"item_idx": index, "start_idx": len(ids), "tokens": full, "is_embed": is_embed})
        ids, end = ids + full, start + length
    if updates and _find(given, list(updates[-1].target), max(searched, end)) is not None:
        raise _refused(f"there are more placeholders than {len(updates)} images")
    return ids + given[end:], found


def _find(ids: Sequence[int], target: Sequence[int], start: int) -> int | None:
    found = (at for at in range(start, len(ids) - len(target) + 1) if ids[at : at + len(target)] == target)
    return next(found, None) if target else None


def _refused(problem: str) -> Exception:
    from vllm.exceptions import VLLMValidationError

    error: Exception = VLLMValidationError(f"{RERENDERED}: {problem}", parameter=FIELD)
    return error


@functools.cache
def _show_in_replies() -> None:
    """Patch the chat route where a renderer is made: the worker processes of vLLM do not load it."""
    from vllm.entrypoints.openai.chat_completion import serving

    return_places(serving.OpenAIServingChat)


def return_places(chat: type[Any]) -> None:
    """Let replies say where their images are; the argument is `OpenAIServingChat`.

    A load of weights empties the caches of images of vLLM's two processes. A call that loses an image so, while it is
    processed or in the engine, fails before its first token, and is tried again, with the image.
    """
    answer, render, narrow = (
        chat.create_chat_completion,
        chat.render_chat_request,
        chat._engine_chat_template_kwargs,  # noqa: SLF001  a hook for subclasses
    )
    pixels: dict[str, str] = {}

    async def render_and_note(self: Any, request: Any) -> Any:
        result = await render(self, request)
        if isinstance(result, tuple) and FIELD in (request.chat_template_kwargs or {}):
            settings = _settings_digest(self.online_renderer.renderer.get_mm_processor())
            _places.set(places_text(result[1][0], settings, pixels))
        return result

    async def answer_with_places(self: Any, request: Any, raw_request: Any = None) -> Any:
        _places.set(None)
        again = functools.partial(answer, self, request, raw_request)
        if FIELD in (request.chat_template_kwargs or {}):
            again = functools.partial(_tried, again)
        reply = await again()
        places = _places.get()
        if places is None:
            return reply
        if hasattr(reply, "__aiter__"):
            return _with_places(_repeated(reply, again), places)
        if hasattr(reply, "choices"):
            setattr(reply, FIELD, places)
        return reply

    def narrowed(self: Any, arguments: dict[str, Any]) -> Any:
        return narrow(self, {name: value for name, value in arguments.items() if name != FIELD})

    chat.render_chat_request = render_and_note
    chat.create_chat_completion = answer_with_places
    chat._engine_chat_template_kwargs = narrowed  # noqa: SLF001  it sends them to another process


async def _tried(again: Callable[[], Awaitable[Any]], num_left: int = MOST_TRIES - 1) -> Any:
    from vllm.exceptions import GenerationError

    try:
        return await again()
    except (AssertionError, GenerationError):
        if not num_left:
            raise
        return await _tried(again, num_left - 1)


async def _repeated(
    events: AsyncIterator[str], again: Callable[[], Awaitable[Any]], num_left: int = MOST_TRIES - 1
) -> AsyncIterator[str]:
    """Yield a stream's events, or those of a further one where it fails before its first token."""
    opened: list[str] | None = [] if num_left else None
    async for event in events:
        if opened is not None and '"role":"assistant"' in event:
            opened.append(event)
            continue
        if opened is not None and event.startswith('data: {"error"') and hasattr(other := await again(), "__aiter__"):
            async for each in _repeated(other, again, num_left - 1):
                yield each
            return
        for each in opened or ():
            yield each
        opened = None
        yield event


async def _with_places(events: AsyncIterator[str], places: str) -> AsyncIterator[str]:
    is_first = True
    async for event in events:
        if is_first and '"choices"' in event:
            head, brace, tail = event.rpartition("}")
            yield f'{head},"{FIELD}":"{places}"{brace}{tail}'
            is_first = False
        else:
            yield event


def places_text(prompt: Any, settings: str, pixels: dict[str, str]) -> str:
    """Return the places of a prompt's images as JSON in base64, which no JSON string of a reply contains.

    `settings` is the digest of the processor's. `pixels` has those of earlier images by vLLM's hash; it is completed.
    """
    images = []
    hashes = prompt.get("mm_hashes", {}).get("image", ())
    items = prompt.get("mm_kwargs", {}).get("image", ())
    places = prompt.get("mm_placeholders", {}).get("image", ())
    for name, item, place in zip(hashes, items, places, strict=True):
        if (made := _pixels_of(item)) is not None:
            while len(pixels) >= _KEPT_DIGESTS:
                del pixels[next(iter(pixels))]
            pixels[name] = pixels_digest(made)
        runs = _runs(place.length if place.is_embed is None else place.is_embed.numpy())
        image = {"offset": place.offset, "length": place.length, "processor": settings, "pixels": pixels.get(name, "")}
        images.append({**image, "runs": [[place.offset + start, length] for start, length in runs]})
    return base64.b64encode(json.dumps(images).encode()).decode()


def _pixels_of(item: Any) -> Any:
    named = (item[name].data for name in sorted(item or ()) if name.startswith("pixel_values"))
    return next((pixels for pixels in named if hasattr(pixels, "detach")), None)  # some models have lists of tensors


def _runs(embedded: Any) -> list[tuple[int, int]]:
    """Return begin and length of each run of True; a number stands for as many of them."""
    if isinstance(embedded, int):
        return [(0, embedded)]
    edges = np.flatnonzero(np.diff(embedded.astype(np.int8), prepend=0, append=0)).tolist()
    return [(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]


@functools.lru_cache(maxsize=4)
def _settings_digest(processor: Any) -> str:
    found = getattr(processor.info.get_hf_processor(), "image_processor", None)
    return processor_digest(found) if hasattr(found, "to_dict") else ""


def processor_digest(image_processor: Any) -> str:
    """Return the digest of what decides the pixels of an image: the processor's class and settings, and the library."""
    import transformers

    settings = json.dumps(image_processor.to_dict(), sort_keys=True, default=str)
    named = f"{type(image_processor).__name__} {transformers.__version__} {settings}"
    return hashlib.blake2b(named.encode(), digest_size=DIGEST_BYTES).hexdigest()


def pixels_digest(pixel_values: Any) -> str:
    """Return the digest of one image's processed pixels, a tensor on the CPU: its number format, and its bytes."""
    import torch

    contiguous = pixel_values.detach().contiguous()
    found = hashlib.blake2b(contiguous.view(torch.uint8).numpy().tobytes(), digest_size=DIGEST_BYTES).hexdigest()
    return f"{str(contiguous.dtype).removeprefix('torch.')}:{found}"
