"""A disk that takes no more, for this process."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_file_over(num_bytes: int) -> Iterator[None]:
    """Let writes beyond so many bytes of a file fail in the block, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
