"""A gateway between clients in the test's process and a proxy: it refuses requests, and loses answers to writes."""

import dataclasses

import httpx2
import pytest


@dataclasses.dataclass
class LossyGateway:
    requests: list[httpx2.Request] = dataclasses.field(default_factory=list)
    refusals: list[httpx2.Response] = dataclasses.field(default_factory=list)
    """Answers to the next requests, which do not reach the proxy."""
    num_lost: int = 0
    """Number of the next writes that reach the proxy, and whose connections break before its answers arrive."""

    def refusal_of(self, request: httpx2.Request) -> httpx2.Response | None:
        """List a request; return the refusal that is its answer, if any."""
        self.requests.append(request)
        return self.refusals.pop(0) if self.refusals else None

    def check_connection(self, request: httpx2.Request) -> None:
        if request.method == "POST" and self.num_lost:
            self.num_lost -= 1
            raise httpx2.ReadError("the answer was lost", request=request)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> LossyGateway:
    """The gateway that all HTTP clients of the test's process use, OpenAI's included."""
    made = LossyGateway()
    send, send_async = httpx2.HTTPTransport.handle_request, httpx2.AsyncHTTPTransport.handle_async_request

    def handle(transport: httpx2.HTTPTransport, request: httpx2.Request) -> httpx2.Response:
        if refusal := made.refusal_of(request):
            return refusal
        answer = send(transport, request)
        made.check_connection(request)
        return answer

    async def handle_async(transport: httpx2.AsyncHTTPTransport, request: httpx2.Request) -> httpx2.Response:
        if refusal := made.refusal_of(request):
            return refusal
        answer = await send_async(transport, request)
        made.check_connection(request)
        return answer

    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", handle)
    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", handle_async)
    return made
