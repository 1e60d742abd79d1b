"""The images of a call: which are read, fetched (from public addresses alone) or refused, and how messages name them.

The engine gets each image as a data URL and fetches nothing, so that no client makes it call an address. The proxy
fetches only where `fetch_images` allows it, and only from public addresses. Each connection is checked where its socket
is opened, by the address that it goes to: a name, a number or a redirect may all stand for a private one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar
from urllib.parse import urljoin, urlsplit

import aiohttp
import numpy as np
import orjson
from pydantic import Field

from proxy.calls.steps import CallStep
from proxy.dialects.base import SENT, Call, Captured
from proxy.sessions.conversation import TEXT_PARTS
from proxy.sessions.forest import KnownTurn, encoded, ids_as_text
from proxy.sessions.place import CallPlace
from turnwise.engine_plugin.features.images import FIELD, RERENDERED
from turnwise.errors import InvalidRequest, TooLarge
from turnwise.features.images import IMAGES, Media, pack_images
from turnwise.image_urls import IMAGE_URL, image_digests
from turnwise.settings import Settings
from turnwise.types import Json, TokenIds

if TYPE_CHECKING:
    from proxy.services import Services
    from proxy.settings import ProxySettings
    from proxy.writer.process import NewTurn

IMAGE_PARTS = ("image_url", "input_image")
OTHER_MEDIA = (
    *("image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"),
    *("audio_url", "input_audio", "video_url"),
)
"""Fields by which vLLM finds the type of a part without one, in its order, after `image_url`."""
SIGNATURES = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "image/bmp": re.compile(rb"BM"),
}
"""How a file of each type begins. What a client calls it does not count, because the page shows it."""
DECODED_HERE_BYTES = 2**18
"""Length of a data URL that is decoded on the event loop, and of a file that is hashed there."""
MAX_REDIRECTS = 3
FETCH_SECONDS = 10.0
"""The longest time to fetch one image."""
MAX_FETCHES = 8
"""Images that one process fetches at the same time."""
REDIRECTS = (301, 302, 303, 307, 308)
P = ParamSpec("P")
T = TypeVar("T")
AddrInfo: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]
Ranges: TypeAlias = list[tuple[int, int]]
"""Offset and length of images in a prompt, in order."""
NAMED = re.compile(rb'"image_url":\{"url":"%b([0-9a-f]{64})"\}' % IMAGE_URL.encode())
"""An image in the JSON of messages."""
PLACED = re.compile(rb',\s*"%b":\s*"([A-Za-z0-9+/=]*)"' % FIELD.encode())
"""The places of a prompt's images, as our plug-in says them; no text can contain this."""
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_NOT_PUBLIC = [
    ipaddress.ip_network(each)
    for each in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
        "168.63.129.16/32",
        *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    )
]
"""IANA's special-purpose addresses, of which 192.0.0.0/24, 2001::/23 and 2002::/16 hold gateways to others, multicast,
and the address of Azure's own services."""
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All public addresses of IPv6; those of NAT64, which stand for any IPv4 address, and of sites lie outside."""
_ISATAP = 0x5EFE
"""In bits 32 to 47 of an address of IPv6, before the IPv4 address that a router sends its packets to."""


class ImageSettings(Settings):
    """Which images are served."""

    max_images: int = Field(default=64, ge=0)
    """Most images in the conversation of one call; the engine has a limit of its own."""
    max_image_bytes: int = Field(default=16 * 2**20, gt=0)
    """Longest file of one image, in bytes."""
    fetch_images: bool = False
    """Whether images are fetched whose messages have an http or https URL: from public addresses only, with at most
    three redirects. The engine never fetches one."""


class Images(CallStep):
    """Takes the images out of calls."""

    def __init__(self, services: Services) -> None:
        assert isinstance(services.settings, ImageSettings)
        self._settings = services.settings
        self._max_body_bytes = services.settings.max_body_bytes
        self._metrics = services.metrics
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        services.take_media = self.take
        services.own_arguments.add(FIELD)
        self._without_plugin: set[str] = set()

    @classmethod
    def is_on(cls, settings: ProxySettings) -> bool:
        return isinstance(settings, ImageSettings)

    async def take(self, call: Call) -> None:
        """Read the images of a call, and name them by their digests in its messages.

        Args:
            call: The call; it has the images of the stored turns that it resumes.

        Raises:
            InvalidRequest: A URL or a file cannot be served, or there are too many images.
            TooLarge: An image, or all that were fetched, have too many bytes.
        """
        messages, images, num_images, num_fetched, has_other = [], dict(call.images), 0, 0, False
        for message in call.messages:
            content = message.get("content")
            parts = list(content) if isinstance(content, list) else []
            for place, part in enumerate(parts):
                if not isinstance(part, dict):
                    continue
                kind = _kind(part)
                if "uuid" in part:  # under it an engine serves the image of another request
                    self._metrics.dropped_fields.labels("uuid").inc()
                    parts[place] = {name: value for name, value in part.items() if name != "uuid"}
                if kind not in IMAGE_PARTS:
                    has_other |= kind not in TEXT_PARTS
                    _check_is_inline(kind, part)
                else:
                    num_images += 1
                    if num_images > self._settings.max_images:
                        raise InvalidRequest(
                            f"the conversation has more than {self._settings.max_images} images, which is the limit; "
                            "send fewer, or raise `max_images`",
                            param="messages",
                            code="too_many_images",
                        )
                    digest, image, is_fetched = await self._read(_url_of(part), images, num_fetched)
                    images[digest] = image
                    num_fetched += len(image.content) if is_fetched else 0
                    parts[place] = {"type": "image_url", "image_url": {"url": IMAGE_URL + digest}}
            messages.append({**message, "content": parts} if parts else message)
        call.messages = call.body["messages"] = messages
        call.media = MediaOfCall(images, self._without_plugin, has_other=has_other) if images or has_other else None

    async def _read(self, url: str, images: dict[str, Media], num_fetched: int) -> tuple[str, Media, bool]:
        """Return the digest of an image, the image, and whether it was fetched."""
        if url.startswith(IMAGE_URL) and (digest := url.removeprefix(IMAGE_URL)) in images:
            return digest, images[digest], False
        is_fetched = url[:8].lower().startswith(("http://", "https://"))
        if is_fetched:
            if not self._settings.fetch_images:
                raise _refused(url, "no image is fetched: send a data URL, or set `fetch_images`", "not_fetched")
            most = min(self._settings.max_image_bytes, self._max_body_bytes - num_fetched)
            async with self._fetches:
                content = await fetch(url, most, FETCH_SECONDS)
        elif (head := _DATA_URL.match(url)) is not None:
            content = await _in_thread(len(url), _decoded, url, head.end())
        else:
            raise _refused(url, "an image is a base64 data URL, or an http or https URL", "invalid_image_url")
        if len(content) > self._settings.max_image_bytes:
            raise _too_large(self._settings.max_image_bytes)
        media_type = next((kind for kind, begin in SIGNATURES.items() if begin.match(content)), None)
        if media_type is None:
            served = ", ".join(kind.removeprefix("image/") for kind in SIGNATURES)
            raise _refused(url, f"its file is none of {served}; convert it to one of these", "unknown_image_type")
        digest = await _in_thread(len(content), _digest, content)
        return digest, Media(media_type, content), is_fetched


class MediaOfCall:
    """The images of a call by their digests, and whether it has content of another kind, which is never trained."""

    def __init__(self, images: dict[str, Media], without_plugin: set[str], *, has_other: bool) -> None:
        """`without_plugin` has the URLs of engines whose last reply to such a call did not say where its images are."""
        self.images = images
        self._without_plugin = without_plugin
        self._url = ""
        """Of the engine that gets the call."""
        self._has_other = has_other
        self._placed: list[Json] | None = None
        """The images of the whole prompt with their places; None where the engine did not say where they are."""
        self._num_old = 0
        """How many of them the turn has that the call extends."""

    def why_not_extended(self, call: Call, path: Sequence[KnownTurn]) -> str | None:
        """Return why a call cannot extend a turn; `path` has the turn and then its ancestors, newest first."""
        if self._has_other:
            return "media"
        shown = image_digests(call.messages[: path[0].num_messages]) if self.images else []
        return None if len(_ranges(path)) == len(shown) else "image_places_unknown"

    def sent(self, call: Call, place: CallPlace, url: str) -> None:
        """Take the call just before the engine with this URL gets it; it may start a chain."""
        self._url = url
        if self.images:
            call.hides[IMAGES] = PLACED
            if place.parent is not None and url in self._without_plugin:
                place.start_chain("engine_without_plugin")

    def why_refused(self, refusal: bytes) -> str | None:
        """Return the reason of a new chain, where the engine's refusal says that it does not take the prompt."""
        return RERENDERED if RERENDERED.encode() in refusal else None

    def request(self, call: Call, place: CallPlace) -> Json | None:
        """Return the messages with their images, and by our plug-in's field the prompt that extends a turn."""
        if not self.images:
            return None
        given: Json = {}
        if place.prompt is not None:
            first = place.prompt.num_ids - len(place.between)
            given = {"ids": orjson.Fragment(place.prompt.json()), "ranges": _known(place), "first": first}
        arguments = {**(call.body.get("chat_template_kwargs") or {}), FIELD: given}
        return {"messages": self.messages(call), "chat_template_kwargs": arguments}

    def messages(self, call: Call) -> Any:
        """Return a call's messages with its images as data URLs, for JSON.

        A text cannot contain the name of an image with these quotes.
        """
        if not self.images:
            return call.messages

        def data_url(found: re.Match[bytes]) -> bytes:
            image = self.images.get(found[1].decode())
            if image is None:  # a field of the client's that looks like an image
                return found[0]
            content = base64.b64encode(image.content)
            return b'"image_url":{"url":"data:%b;base64,%b"}' % (image.media_type.encode(), content)

        return orjson.Fragment(NAMED.sub(data_url, call.messages_json))

    def find(self, call: Call, place: CallPlace, captured: Captured) -> str | None:
        """Find the images in the prompt; return why the call cannot be trained.

        The prompt that was sent has one placeholder for each new image, which the engine expands. So the place gets the
        prompt that was sampled after, if that is what was sent in all other tokens.
        """
        digests = image_digests(call.messages) if self.images else []
        said = captured.said.get(IMAGES)
        if self.images and captured.choices:
            (self._without_plugin.add if said is None else self._without_plugin.discard)(self._url)
        found = None if said is None else orjson.loads(base64.b64decode(said))
        if digests and found is not None and len(found) == len(digests):
            self._placed = [{"digest": digest, **where} for digest, where in zip(digests, found, strict=True)]
            known, ranges = _known(place), [(image["offset"], image["length"]) for image in self._placed]
            self._num_old = len(known)
            if ranges[: len(known)] == known:
                _expand(place, captured.prompt_ids, ranges[len(known) :])
        if self._has_other:
            return "media"
        return None if self._placed is not None or not self.images else "image_places_unknown"

    def keep_with(self, turn: NewTurn, *, is_first: bool = True) -> None:
        """Let a turn of the call keep what belongs to its messages; the first one also what is stored once a call."""
        added = (self._placed or [])[self._num_old if turn.parent_turn_id is not None else 0 :]
        if added:
            turn.parts[IMAGES] = pack_images(added)
        if self.images and is_first:
            turn.extra["media"] = {digest: self.images[digest] for digest in image_digests(turn.messages)}


def _ranges(path: Sequence[KnownTurn]) -> Ranges:
    """Return the places of the images in a turn's tokens; `path` begins with the turn."""
    packed = (turn.parts[IMAGES] for turn in reversed(path) if turn.parts and IMAGES in turn.parts)
    return [(image["offset"], image["length"]) for images in map(orjson.loads, packed) for image in images]


def _known(place: CallPlace) -> Ranges:
    return [] if place.parent is None else _ranges([*place.forest.ancestors(place.parent)])


def _expand(place: CallPlace, echo: bytes, added: Ranges) -> None:
    """Give a call's place the prompt that the engine has made of the one that was sent; `added` are its new images."""
    sent = place.prompt
    if place.parent is None or sent is None or echo == SENT or not added:
        return
    before = sent.before if len(place.between) else sent
    if before is not None and echo.startswith(before.json()[1:-1] + b","):
        ids = np.fromstring(echo, np.int32, sep=",")
        between = ids[before.num_ids :]
        if is_expanded(place.between, between, [(at - before.num_ids, length) for at, length in added]):
            place.between, place.prompt = between, encoded(ids_as_text(between), len(ids), before)


def is_expanded(sent: TokenIds, found: TokenIds, places: Sequence[tuple[int, int]]) -> bool:
    """Return whether ids are the sent ones but for placeholders, each of which stands for the same few ids."""
    length, rest = divmod(len(sent) - len(found) + sum(length for _, length in places), len(places))
    end = end_sent = 0
    targets = set()
    for at, whole in places:
        begin = end_sent + at - end
        if at < end or not np.array_equal(found[end:at], sent[end_sent:begin]):
            return False
        end, end_sent = at + whole, begin + length
        targets.add(sent[begin:end_sent].tobytes())
    return not rest and len(targets) == 1 and np.array_equal(found[end:], sent[end_sent:])


def _kind(part: Json) -> Any:
    """Return the type of a part as vLLM takes it, which also names it by its fields."""
    kind = part.get("type")
    if kind is None or "uuid" in part:
        kind = next((field for field in (IMAGE_PARTS[0], *OTHER_MEDIA) if field in part), kind)
    return kind


def _named(part: Json, field: str) -> Any:
    named = part.get(field)
    return named.get("url") if isinstance(named, dict) else named


def _url_of(part: Json) -> str:
    url = _named(part, "image_url")
    if not isinstance(url, str):
        raise InvalidRequest(
            f"an image needs a URL in `image_url`, not {part.get('image_url')!r:.80}", param="messages"
        )
    return url


def _check_is_inline(kind: Any, part: Json) -> None:
    if kind not in ("audio_url", "video_url"):
        return
    url = str(_named(part, kind))
    if not url[:5].lower().startswith("data:"):
        raise _refused(url, f"no `{kind}` is fetched; send a data URL", "not_fetched")


def _refused(url: str, why: str, code: str) -> InvalidRequest:
    return InvalidRequest(f"the media at {url!r:.80} cannot be served: {why}", param="messages", code=code)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"an image has more than {limit} bytes, which is the limit; send a smaller one", param="messages")


async def _in_thread(num_bytes: int, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function of some bytes, in a thread if these are many."""
    if num_bytes <= DECODED_HERE_BYTES:
        return function(*arguments, **options)
    return await asyncio.to_thread(function, *arguments, **options)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _decoded(url: str, start: int) -> bytes:
    try:
        return base64.b64decode(url[start:].strip(), validate=True)
    except ValueError as error:
        why = f"it is not base64 ({error}); send the standard alphabet with its padding, on one line"
        raise _refused(url, why, "invalid_image_url") from error


async def fetch(url: str, max_bytes: int, seconds: float) -> bytes:
    """Return the file at an http or https URL.

    Raises:
        InvalidRequest: It is at a private address, or it was not answered in time, or with an error.
        TooLarge: It has more than `max_bytes`.
    """
    private: list[str] = []

    def public_socket(info: AddrInfo) -> socket.socket:
        """Open a socket for the address that a connection is about to go to, whatever the URL calls it."""
        family, kind, protocol, _, address = info
        found = _address(str(address[0]))
        if found is None or not is_public(found):
            private.append(str(address[0]))
            raise OSError(f"{address[0]} is no public address")
        return socket.socket(family, kind, protocol)

    connector = aiohttp.TCPConnector(force_close=True, socket_factory=public_socket)
    jar, timeout = aiohttp.DummyCookieJar(), aiohttp.ClientTimeout(total=seconds)
    try:
        async with (
            asyncio.timeout(seconds),
            aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar) as session,
        ):
            for _ in range(1 + MAX_REDIRECTS):
                content, moved = await _get(session, url, max_bytes)
                if moved is None:
                    return content
                url = urljoin(url, moved)
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        if private:
            raise _refused(url, f"{private[0]} is no public address", "private_address") from error
        reason = str(error) or type(error).__name__
        raise _refused(url, f"it cannot be fetched ({reason:.200})", "image_not_fetched") from error
    raise _refused(url, f"it redirects more than {MAX_REDIRECTS} times", "image_not_fetched")


async def _get(session: aiohttp.ClientSession, url: str, max_bytes: int) -> tuple[bytes, str | None]:
    """Return the file, or what the answer redirects to."""
    named = urlsplit(url)
    if named.scheme not in ("http", "https") or named.username is not None:
        raise _refused(url, "it is fetched by http or https only, without a user name", "invalid_image_url")
    async with session.get(url, allow_redirects=False, headers={"accept": "image/*"}) as answer:
        if answer.status in REDIRECTS and "location" in answer.headers:
            return b"", answer.headers["location"]
        if answer.status != HTTPStatus.OK:
            raise _refused(url, f"its server answered {answer.status}", "image_not_fetched")
        parts, num_bytes = [], 0
        async for part in answer.content.iter_any():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
        return b"".join(parts), None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is one of the public internet, and stands for no address of IPv4."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address not in _GLOBAL_UNICAST or (int(address) >> 32) & 0xFFFF == _ISATAP:
            return False
    return not any(address in network for network in _NOT_PUBLIC)
