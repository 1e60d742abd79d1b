"""langchain-tests' standard suite for chat models, on langchain-openai through the proxy, over both of its routes."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from support.proxies import ProxyAndEngine
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine, ToolCall

# The suite and its plugins emit warnings of their own.
pytestmark = pytest.mark.filterwarnings("default")


OTHER_MODEL = "other"
JOKE = {"setup": "Why do parrots have links?", "punchline": "They repeat themselves."}
CUSTOMERS = ("你好啊集团", "こんにちは株式会社")


class Standard(ChatModelIntegrationTests):
    """LangChain's tests of a chat model, as far as they apply to a text model."""

    use_responses_api = False
    reached_by: dict[str, Any]

    @pytest.fixture(autouse=True)
    def _through_the_proxy(
        self,
        shared_proxy: ProxyAndEngine,
        fake_engine: RunningFakeEngine,
        http: httpx2.Client,
        async_http: httpx2.AsyncClient,
    ) -> None:
        """Point the model at the proxy, and script the fake engine with the replies that the suite expects."""
        self.reached_by = {
            "base_url": shared_proxy.proxy.v1,
            "http_client": http,
            "http_async_client": async_http,
        }
        fake_engine.state.adapters[OTHER_MODEL] = "adapter"
        fake_engine.answer(Rule(contains="punchline", reply=Reply(text=json.dumps(JOKE))))
        for customer in CUSTOMERS:
            call = ToolCall(name="unicode_customer", arguments={"customer_name": customer, "description": customer})
            fake_engine.answer(Rule(contains=customer, reply=Reply(tool_calls=[call])))

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "fake",
            "api_key": "any",
            "max_retries": 0,
            **self.reached_by,
            "use_responses_api": self.use_responses_api,
            "stream_usage": True,
        }

    @property
    def model_override_value(self) -> str:
        return OTHER_MODEL

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatCompletions(Standard):
    pass


class TestResponses(Standard):
    use_responses_api = True
