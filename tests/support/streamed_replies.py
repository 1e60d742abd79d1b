"""The reply of a streamed chat, as an agent reads it that tells a complete reply from one that was cut off."""

import contextlib
import dataclasses

import aiohttp
import orjson


@dataclasses.dataclass(slots=True)
class StreamedReply:
    turn_id: str = ""
    text: str = ""
    is_complete: bool = False
    """Whether its finish was received and no error, whether or not the stream ended properly."""
    has_ended: bool = False
    """Whether the stream itself ended, and not its connection."""
    error_code: str | None = None
    """Code of the error that ended it."""

    async def read(self, response: aiohttp.ClientResponse) -> None:
        with contextlib.suppress(aiohttp.ClientError, ConnectionResetError):
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = orjson.loads(line[len(b"data: ") :])
                if "error" in chunk:
                    self.error_code, self.is_complete = chunk["error"]["code"], False
                    return
                for choice in chunk["choices"]:
                    self.turn_id = chunk["id"]
                    self.text += choice["delta"].get("content") or ""
                    self.is_complete = self.is_complete or choice["finish_reason"] is not None
            self.has_ended = True
