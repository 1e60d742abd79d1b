"""The C library's memory: freed memory is kept for the next call, and returned to the system now and then.

By default the C library returns the memory of a long request as soon as it is freed. The next long request gets it
back page by page, and these page faults take more CPU than all copies of the request.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import TYPE_CHECKING

from proxy.services import Beside

if TYPE_CHECKING:
    from proxy.services import Services

TRIM_SECONDS = 5.0
"""How often freed memory may be returned to the system; it takes 1 to 3 ms."""
TRIM_BYTES = 8 * 2**20
"""Bytes of long requests after which it is returned."""
KEPT_BYTES = 64 * 2**20
"""Freed memory above this is returned at once."""
MAPPED_BYTES = 32 * 2**20
"""Longer blocks are mapped on their own, and returned as soon as they are freed; the C library's maximum."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


class FreedMemory(Beside):
    """Keeps freed memory, and returns it to the system while long requests arrive; not of other libraries than glibc.

    Decoding one prompt of 300,000 tokens leaves tens of megabytes.
    """

    def __init__(self, services: Services) -> None:
        self._conversations = services.sessions.conversations
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        set_parameter = getattr(library, "mallopt", None)
        if set_parameter is not None:
            set_parameter(M_MMAP_THRESHOLD, MAPPED_BYTES)
            set_parameter(M_TRIM_THRESHOLD, KEPT_BYTES)

    async def run(self) -> None:
        returned_at = 0
        while self._trim is not None:
            await asyncio.sleep(TRIM_SECONDS)
            num_bytes_read = self._conversations.num_bytes_read
            if num_bytes_read - returned_at >= TRIM_BYTES:
                returned_at = num_bytes_read
                await asyncio.to_thread(self._trim, 0)
