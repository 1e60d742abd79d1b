"""Images: what the engine's processor made of them, as digests that the trainer compares with its own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

DIGEST_BYTES = 16


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
