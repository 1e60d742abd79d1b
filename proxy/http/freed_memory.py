"""The C library's memory: freed memory is kept for the next call, and returned to the system now and then.

By default the C library returns the memory of a long request as soon as it is freed. The next long request gets it
back page by page, and these page faults take more CPU than all copies of the request.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

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


def keep_freed_memory() -> None:
    """Let the C library keep freed memory; other libraries than glibc are left as they are."""
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_parameter is not None:
        set_parameter(M_MMAP_THRESHOLD, MAPPED_BYTES)
        set_parameter(M_TRIM_THRESHOLD, KEPT_BYTES)


async def return_freed_memory(num_bytes_read: Callable[[], int]) -> None:
    """Return freed memory to the system while long requests arrive, until cancelled.

    Decoding one prompt of 300,000 tokens leaves tens of megabytes.

    Args:
        num_bytes_read: Returns the bytes of all long requests so far.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    returned_at = 0
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        if num_bytes_read() - returned_at >= TRIM_BYTES:
            returned_at = num_bytes_read()
            await asyncio.to_thread(trim, 0)
