"""The settings of the proxy. Each number has its unit in its name."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from turnwise.errors import SettingsError
from turnwise.settings import Settings, mask_credentials

CACHE_TENTHS = {"turns": 4, "messages": 4, "tokens": 1, "answers": 1}
"""How `cache_bytes` is divided."""


class ProxySettings(Settings):
    """Settings of one proxy."""

    engine: list[str] = Field(default=["http://127.0.0.1:8000"], min_length=1)
    """vLLM base URLs. Each listens on loopback or a private network only."""
    database: SecretStr = SecretStr("sqlite:///turnwise.db")
    """SQLAlchemy URL of the store; a secret, because it may hold a password."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs at least one API key in the store."""
    port: int = Field(default=8100, ge=0, le=65535)
    tls_certificate: Path | None = None
    """PEM file with the certificate chain; with it and `tls_key` the proxy serves HTTPS."""
    tls_key: Path | None = None
    """PEM file with the certificate's private key."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Further host names that a proxy without keys answers to; loopback names always work."""
    cors_origins: list[str] = Field(default_factory=list)
    """Origins of web pages that may call the proxy, `*` for all; by default none."""
    public_url: str | None = None
    """URL that clients reach the proxy by, for the `base_url` of a session, with the path if a server in front of the
    proxy adds one; by default the request's own Host."""
    secret: SecretStr | None = None
    """Signs session keys; by default a random one that all proxy processes share through the store."""
    retrain_revised: bool = False
    """Whether a reward for a session that was trained makes its group ready to be trained again."""
    policy_tenant: str | None = None
    """Tenant that owns the model: only its keys publish and activate policy versions. They also read what names other
    tenants' policies. By default the tenant `default`, or one beside which no other has keys or policies."""

    engine_api_key: SecretStr | None = None
    """Bearer key that the proxy presents to the engines (vLLM's --api-key)."""
    engine_ca: Path | None = None
    """PEM file with the authorities that sign the engines' certificates; by default those of the system."""
    engine_certificate: Path | None = None
    """PEM file with the certificate that the proxy presents to the engines."""
    engine_certificate_key: Path | None = None
    """PEM file with that certificate's private key, unless the certificate's file holds it."""
    engine_check: Literal["strict", "warn", "off"] = "strict"
    """What to do about an engine that lacks what exact capture needs: refuse it, log a warning, or skip the check.
    `off` takes the chat template of `tokenizer`, or of the directory that the engine serves, as it is; without one no
    turn continues another."""
    tokenizer: str | None = None
    """Directory or id of the served model's tokenizer; by default the engine's own model path."""
    continuation: bool = True
    """Extend stored tokens from the second turn on. If off, every turn is tokenised again: for measuring the drift."""
    thinking: Literal["template", "keep"] = "template"
    """Thinking that a chat template drops later: follow the template into a new chain, or keep it and stay on one."""
    call_text: Literal["compare", "ignore"] = "compare"
    """Text that a client leaves out beside tool calls whose ids it sends back: a new chain, or the same one."""
    failed_tool_text: str = "The tool call failed."
    """First line of a tool result that the client marks as failed (`is_error`): no chat template has a field for it. An
    empty text drops the mark."""

    max_body_bytes: int = Field(default=32 * 2**20, gt=0)
    max_reply_bytes: int = Field(default=320 * 2**20, gt=0)
    """Longest reply of an engine, whole or streamed, in bytes; a longer one is cut off and answered 502. By default
    131,072 tokens with `top_logprobs` of 20 fit, which take up to 250 MiB."""
    max_json_string_bytes: int = Field(default=8 * 2**20, gt=0)
    """Longest string in one request body. Longer ones can hold the event loop for more than 5 ms."""
    max_concurrent_calls: int = Field(default=1024, gt=0)
    """Concurrent calls; more are answered 429."""
    header_timeout_seconds: float = Field(default=30.0, gt=0)
    """A request whose headers and body are not complete by then is closed."""
    stream_keep_alive_seconds: float = Field(default=15.0, ge=0)
    """A stream that has been silent for this long gets a comment, so that no load balancer cuts it; 0 sends none."""
    client_stall_seconds: float = Field(default=30.0, gt=0)
    """A client that reads nothing of its reply for this long is disconnected, and its call ends."""
    engine_timeout_seconds: float = Field(default=600.0, gt=0)
    """The longest silence of an engine within one call."""
    engine_wait_seconds: float = Field(default=180.0, ge=0)
    """How long a call waits while no engine is ready but one is expected back, before it is answered 503; under
    `turnwise up` by default as long as an engine may take to start, `start_seconds` of `[up]`."""
    drain_seconds: float = Field(default=30.0, gt=0)
    """How long running calls may continue after SIGTERM; then they are cut off and stored as `aborted`."""
    ignored_ids: list[str] = Field(default=[])
    """Ids that harnesses send by themselves and that must not name a session: `x-session-id`, `claude-code`, `codex`,
    `litellm`, `session-affinity`, `claude-user`, `conversation`, `prompt-cache-key`."""
    session_idle_seconds: float = Field(default=3600.0, gt=0)
    """An open session without a call for this long expires. One that no call names and that has a reward ends after
    ten minutes at the latest."""

    cache_bytes: int = Field(default=320 * 2**20, ge=0)
    """Memory for what later calls need: two fifths for the turns of recent sessions, two fifths for the digests of
    messages, a tenth for tokens, and a tenth for answers that a retried call may repeat. The rest is read back from the
    store."""
    commit_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long a turn's commit is retried while the store is locked or unreachable, before the call fails."""
    reload_timeout_seconds: float = Field(default=300.0, gt=0)
    """The longest a reload may take before the last good version is restored. The check of a version's files, which
    comes before, has no limit: the engines serve what they have until the files are read."""
    probe_tolerance: float | None = Field(default=None, ge=0)
    """Largest |logprob difference| between the engine and a checkpoint's own probe, nats. By default five times that
    of version 0, and at least 0.0005 where both are in float32, 0.25 on a coarser engine, 1.0 for a coarser checkpoint;
    on average 0.00005, 0.05 and 0.1."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    """Form of the process's log lines on stderr."""
    fault: str | None = None
    """For tests of crashes: the named point of a call at which the process kills itself, see `proxy/fault.py`."""

    def cache_share(self, of: str) -> int:
        """Return the bytes of one of the caches in `CACHE_TENTHS`."""
        return self.cache_bytes * CACHE_TENTHS[of] // 10

    def engine_tls(self) -> ssl.SSLContext | None:
        """Return how engines with `https://` are called; None for the system's authorities and no certificate.

        Raises:
            SettingsError: a file cannot be read, or is not PEM.
        """
        files = [each for each in (self.engine_ca, self.engine_certificate, self.engine_certificate_key) if each]
        if not files:
            return None
        try:
            tls = ssl.create_default_context(cafile=self.engine_ca)
        except OSError as error:  # an SSLError is one
            raise SettingsError(
                f"engine_ca={str(self.engine_ca)!r} cannot be used: {error}; name a PEM file"
            ) from error
        self.load_certificate(tls, "engine_certificate", "engine_certificate_key")
        return tls

    def load_certificate(self, tls: ssl.SSLContext, name: str, key_name: str) -> None:
        """Load the certificate of a setting with the key of another one; neither may be set.

        Raises:
            SettingsError: a file is missing, is not PEM, or the key is of another certificate.
        """
        certificate, key = getattr(self, name), getattr(self, key_name)
        if certificate is None:
            if key is not None:
                raise SettingsError(f"{key_name}={str(key)!r} needs {name} too; name a PEM file")
            return
        try:
            tls.load_cert_chain(certificate, key)
        except OSError as error:
            files = f"{name}={str(certificate)!r}" + (f" with {key_name}={str(key)!r}" if key else "")
            raise SettingsError(
                f"{files} cannot be used: {error}; name PEM files of a certificate and its key"
            ) from error

    def engine_client_options(self) -> dict[str, Any]:
        """Return the options with which an `httpx2.Client` calls engines as the proxy does.

        Raises:
            SettingsError: a TLS file cannot be read, or is not PEM.
        """
        key = self.engine_api_key
        headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
        return {"headers": headers, "verify": self.engine_tls() or True, "trust_env": False}

    @field_validator("engine")
    @classmethod
    def _check_engines(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not is_http_url(url):
                raise ValueError(f"{mask_credentials(url)!r} is not the URL of an engine; write http://HOST:PORT")
        return urls

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, url: str | None) -> str | None:
        if url is not None and not is_http_url(url):
            raise ValueError(
                f"{mask_credentials(url)!r} is not the URL of a proxy; write https://HOST or https://HOST/PATH"
            )
        return url


def is_http_url(url: str) -> bool:
    """Return whether a client can call this URL."""
    try:
        parts = urlsplit(url)
        return bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isascii())
    except ValueError:  # a port that is none, half an IPv6 address
        return False
