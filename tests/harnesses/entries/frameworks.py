"""Frameworks in which agents are written, for Python and Node."""

from __future__ import annotations

import json
from collections.abc import Sequence

from harnesses.entry import Harness, Tool, node_program, python_program
from turnwise_fake_engine import Reply, ToolCall

TASK = Tool("delegate", "task")
SMOLAGENTS = (
    "It sends its calls back as text of the assistant (`Calling tools: …`), which the model did not sample: its next "
    "request extends no turn."
)
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""No download of prices at the start."""


def _final_answer(text: str) -> Reply:
    """Return the tool call that ends a run of smolagents."""
    return Reply(text="Done.", tool_calls=[ToolCall(name="final_answer", arguments={"answer": text})])


def _code(lines: Sequence[str]) -> Reply:
    """Return a reply that is code, as smolagents' code agent writes it."""
    return Reply(text="\n".join(["I look.", "<code>", *lines, "</code>"]), finish_reason="stop")


def _bash_code(calls: Sequence[ToolCall]) -> Reply:
    return _code([f"print(bash({_command(call)!r}))" for call in calls])


def _command(call: ToolCall) -> str:
    assert isinstance(call.arguments, dict)
    return str(call.arguments["command"])


def _dspy(**fields: str) -> Reply:
    """Return a reply in DSPy's format."""
    return Reply(text="\n\n".join([*(f"[[ ## {k} ## ]]\n{v}" for k, v in fields.items()), "[[ ## completed ## ]]"]))


def _dspy_calls(calls: Sequence[ToolCall]) -> Reply:
    arguments = json.dumps({"command": _command(calls[0])})
    return _dspy(next_thought="I look.", next_tool_name="bash", next_tool_args=arguments)


def _dspy_last(text: str) -> Reply:
    fields = {"next_thought": "Done.", "next_tool_name": "finish", "next_tool_args": "{}"}
    return _dspy(**fields, reasoning="Done.", answer=text)


FRAMEWORKS = (
    Harness(
        name="LangGraph",
        installer="dev",
        package="langgraph",
        dialect="chat",
        pointing="`ChatOpenAI(base_url=…/v1)`",
        argv=python_program("langgraph_agent"),
        delegate=TASK,
    ),
    Harness(
        name="OpenAI Agents SDK",
        installer="dev",
        package="openai-agents",
        dialect="responses",
        pointing="`OPENAI_BASE_URL=…/v1` or `AsyncOpenAI(base_url=…/v1)`",
        argv=python_program("openai_agents"),
        delegate=Tool("delegate", "input"),
    ),
    Harness(
        name="pydantic-ai",
        installer="dev",
        package="pydantic-ai-slim",
        dialect="chat",
        pointing="`OPENAI_BASE_URL=…/v1` or `OpenAIProvider(base_url=…/v1)`",
        argv=python_program("pydantic_ai_agent"),
        delegate=TASK,
    ),
    Harness(
        name="smolagents, ToolCallingAgent",
        installer="dev",
        package="smolagents",
        dialect="chat",
        pointing="`OpenAIModel(api_base=…/v1)`",
        argv=python_program("smolagents_tools"),
        last=_final_answer,
        delegate=Tool("expert", "task"),
        remark=SMOLAGENTS
        + " It requires a call in every reply, so a real engine cannot sample the long text of the check `client "
        "gone`; in front of the fake engine the check holds.",
    ),
    Harness(
        name="smolagents, CodeAgent",
        installer="dev",
        package="smolagents",
        dialect="chat",
        pointing="`OpenAIModel(api_base=…/v1)`",
        argv=python_program("smolagents_code"),
        ask=_bash_code,
        remark=SMOLAGENTS,
        last=lambda text: _code([f"final_answer({text!r})"]),
        offers_tools=False,
    ),
    Harness(
        name="DSPy",
        installer="pypi",
        package="dspy",
        dialect="chat",
        pointing="`dspy.LM(api_base=…/v1)`, model `openai/NAME`",
        argv=python_program("dspy_react"),
        ask=_dspy_calls,
        remark="Each of its steps is a new prompt without the earlier replies, by design: one chain for each call.",
        last=_dspy_last,
        offers_tools=False,
        environment=LITELLM,
    ),
    Harness(
        name="CrewAI",
        remark="It drops the text beside a tool call when it sends a reply back.",
        installer="pypi",
        package="crewai",
        dialect="chat",
        pointing="`LLM(base_url=…/v1)`, model `openai/NAME`",
        argv=python_program("crewai_crew"),
        environment={
            "CREWAI_DISABLE_TELEMETRY": "true",
            "OTEL_SDK_DISABLED": "true",
            "CREWAI_TRACING_ENABLED": "false",
        },
    ),
    Harness(
        name="AutoGen",
        installer="pypi",
        package="autogen-agentchat",
        beside=("autogen-ext[openai]",),
        dialect="chat",
        pointing="`OPENAI_BASE_URL=…/v1` or `OpenAIChatCompletionClient(base_url=…/v1)`",
        argv=python_program("autogen_agent"),
    ),
    Harness(
        name="LlamaIndex",
        installer="pypi",
        package="llama-index-core",
        beside=("llama-index-llms-openai-like",),
        dialect="chat",
        pointing="`OpenAILike(api_base=…/v1)`",
        argv=python_program("llama_index_agent"),
    ),
    Harness(
        name="Google ADK",
        installer="pypi",
        package="google-adk",
        dialect="gemini",
        pointing="`GOOGLE_GEMINI_BASE_URL=…` (no `/v1`), or LiteLLM's `api_base=…/v1`",
        argv=python_program("google_adk"),
        delegate=Tool("delegate", "request"),
    ),
    Harness(
        name="Strands",
        installer="pypi",
        package="strands-agents",
        beside=("openai",),
        dialect="chat",
        pointing='`OpenAIModel(client_args={"base_url": …/v1})`',
        argv=python_program("strands_agent"),
        delegate=TASK,
    ),
    Harness(
        name="Agno",
        installer="pypi",
        package="agno",
        beside=("openai",),
        dialect="chat",
        pointing="`OpenAILike(base_url=…/v1)`",
        argv=python_program("agno_agent"),
    ),
    Harness(
        name="Haystack",
        installer="pypi",
        package="haystack-ai",
        dialect="chat",
        pointing="`OpenAIChatGenerator(api_base_url=…/v1)`",
        argv=python_program("haystack_agent"),
    ),
    Harness(
        name="OpenHands SDK",
        installer="pypi",
        package="openhands-sdk",
        beside=("openhands-tools",),
        python=">=3.12",
        dialect="chat",
        pointing="`LLM(base_url=…/v1)`, model `openai/NAME`",
        argv=python_program("openhands_conversation"),
        tool=Tool("terminal"),
        environment=LITELLM,
    ),
    Harness(
        name="Vercel AI SDK",
        installer="npm",
        package="ai",
        beside=("@ai-sdk/openai-compatible", "zod"),
        dialect="chat",
        pointing="`createOpenAICompatible({baseURL: …/v1})`",
        argv=node_program("ai_sdk_chat"),
    ),
    Harness(
        name="Vercel AI SDK, `openai()`",
        installer="npm",
        package="ai",
        beside=("@ai-sdk/openai", "zod"),
        dialect="responses",
        pointing="`createOpenAI({baseURL: …/v1})` or `OPENAI_BASE_URL=…/v1`",
        argv=node_program("ai_sdk_responses"),
    ),
    Harness(
        name="OpenAI Agents JS",
        installer="npm",
        package="@openai/agents",
        beside=("zod",),
        dialect="responses",
        pointing="`OPENAI_BASE_URL=…/v1` or `new OpenAI({baseURL})`",
        argv=node_program("openai_agents"),
        delegate=Tool("delegate", "input"),
    ),
    Harness(
        name="Mastra",
        installer="npm",
        package="@mastra/core",
        beside=("zod",),
        dialect="chat",
        pointing='model `{id: "provider/NAME", url: …/v1}`',
        argv=node_program("mastra_agent"),
    ),
)
