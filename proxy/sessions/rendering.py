"""What a long conversation may cost others: one that cannot fit is not rendered, and a tenant has a share of threads.

A text has at least as many tokens as its bytes divided by those of the vocabulary's longest token. White space does not
count, because templates drop it at the ends of texts; letters and digits are counted alone too, because the longest
tokens are lines of one sign. A tenant may have one thread less than there are, and waiting tenants take turns, so many
long calls delay another tenant by at most one of them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from turnwise.errors import PromptTooLong
from turnwise.tokenizer import text_of_part
from turnwise.types import Json

NUM_THREADS = 3
UNCOUNTED_BYTES = 64 * 2**10
"""Characters of new messages that are rendered without a look at their least number of tokens."""
BEYOND_ASCII = bytes(range(0x80, 0x100))
NOT_VISIBLE = bytes((*range(0x21), 0x7F, *BEYOND_ASCII))
NO_WORDS = bytes(byte for byte in range(0x100) if not (byte < 0x80 and chr(byte).isalnum()))
NORMALISED = 4
"""How many times shorter a tokenizer may make what is not ASCII: NFKC makes a letter of four bytes one of ASCII."""
T = TypeVar("T")


class LongestTokens(NamedTuple):
    """The most bytes of one token of a vocabulary, which are at least 1."""

    visible: int
    """That are no white space."""
    words: int
    """That are letters and digits of ASCII."""

    @classmethod
    def of(cls, vocabulary: Iterable[str]) -> LongestTokens:
        entries = [entry.encode(errors="replace") for entry in vocabulary]
        visible = max(map(len, entries), default=1)
        return cls(max(1, visible), max(1, *(len(entry.translate(None, NO_WORDS)) for entry in entries)))

    def least_tokens(self, texts: Iterable[str]) -> int:
        """Return how many tokens these texts have at least, whatever the tokenizer does with them."""
        num_visible = num_words = 0
        for text in texts:
            encoded = text.encode(errors="replace")
            num_ascii = len(encoded.translate(None, BEYOND_ASCII))
            composing = len(text) - num_ascii  # each character beyond ASCII may be composed with the letter before it
            num_visible += max(0, len(encoded.translate(None, NOT_VISIBLE)) - composing)
            num_visible += (len(encoded) - num_ascii) // NORMALISED
            num_words += max(0, len(encoded.translate(None, NO_WORDS)) - composing)
        return max(num_visible // self.visible, num_words // self.words)


async def check_fits(
    messages: Sequence[Json], num_before: int, limit: float, longest_tokens: Callable[[], LongestTokens]
) -> None:
    """Check that messages after so many tokens can fit into a context of `limit` tokens.

    Replies are not counted: templates leave out what was thought in them.

    Raises:
        PromptTooLong: they cannot.
    """
    texts = [text for each in messages if each.get("role") != "assistant" for text in _texts(each.get("content"))]
    if sum(map(len, texts)) <= max(UNCOUNTED_BYTES, (limit - num_before) // 4):  # a character has at most four bytes
        return
    least = num_before + await asyncio.to_thread(lambda: longest_tokens().least_tokens(texts))
    if least > limit:
        raise PromptTooLong(
            f"This model's maximum context length is {limit} tokens, but the prompt has at least {least}: shorten the "
            "messages, or start a new conversation",
            num_tokens=least - num_before,
        )


def _texts(content: object) -> Iterable[str]:
    if isinstance(content, str):
        return (content,)
    parts = content if isinstance(content, list) else ()
    return [text_of_part(part) for part in parts if isinstance(part, str | Mapping)]


class RenderThreads:
    """Runs functions in threads; what has not started when its caller is cancelled is not run."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="render")
        self._num_threads = num_threads
        self._running: collections.Counter[str] = collections.Counter()
        """Threads of each tenant, also of those whose caller has left."""
        self._waiting: collections.OrderedDict[str, collections.deque[asyncio.Future[None]]] = collections.OrderedDict()
        """What waits, by tenant; the first tenant is served next."""

    async def run(self, tenant: str, function: Callable[..., T], *args: object) -> T:
        """Return what a function returns, which runs as soon as its tenant has a thread."""
        loop = asyncio.get_running_loop()
        granted = loop.create_future()
        self._waiting.setdefault(tenant, collections.deque()).append(granted)
        self._start_waiting()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # granted at the same time
                self._give_back(tenant)
            raise
        future = self._threads.submit(function, *args)

        def give_back(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._give_back, tenant)

        future.add_done_callback(give_back)
        return await asyncio.wrap_future(future)

    def _give_back(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Give free threads to tenants in turn, one each, until none may have another."""
        started = True
        while started:
            started = False
            for tenant in list(self._waiting):
                queue = self._waiting[tenant]
                while queue and queue[0].cancelled():
                    queue.popleft()
                if queue and self._has_thread(tenant):
                    self._running[tenant] += 1
                    queue.popleft().set_result(None)
                    self._waiting.move_to_end(tenant)
                    started = True
                if not queue:
                    del self._waiting[tenant]

    def _has_thread(self, tenant: str) -> bool:
        share = max(1, self._num_threads - 1)
        return self._running.total() < self._num_threads and self._running[tenant] < share
