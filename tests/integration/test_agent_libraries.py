"""Sessions of real agent libraries with a gateway. The answers are scripted, but obey the grammar
of each request.

The libraries send tools together with a response format for the last answer, hand a conversation
over to another agent, and send back items as they received them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import agents
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from tests.support.gateway_process import GatewayProcess
from tests.support.scenarios import call, held_to
from tests.support.scripted_engine import Reply, ScriptedEngine, text_of, thinking_card

agents.set_tracing_disabled(True)  # it would send every session to OpenAI

QUESTION = "How is the weather in Oslo?"
RAIN = "Rain, 4 degrees."
REPORT = '{"city": "Oslo", "celsius": 4}'
THOUGHT = "<think>\nhm\n</think>\n\n"


class Report(BaseModel):
    city: str
    celsius: int


ENGINE = {"card": thinking_card(), "max_len": 1 << 20}


GATEWAY = {"response_store": "responses.db"}


def follows(engine: ScriptedEngine, *turns: tuple[str, str]) -> None:
    """Make the engine reply with the text of the last turn whose sign occurs in the prompt.

    turns   (sign, text) of each turn
    """

    def script(generate: Any) -> Reply:
        prompt = text_of(generate.prompt.tolist())
        text = next(text for sign, text in reversed(turns) if sign in prompt)
        return held_to(THOUGHT + text)(generate)

    engine.script = script


def weather_session(engine: ScriptedEngine) -> None:
    follows(engine, (QUESTION, call("weather", {"city": "Oslo"})), (RAIN, REPORT))


# ---- openai-agents


def weather_in(city: str) -> str:
    """The weather in a city."""
    assert city == "Oslo"
    return RAIN


weather = agents.function_tool(weather_in, name_override="weather")

Api = Callable[[AsyncOpenAI], agents.Model]
APIS: dict[str, Api] = {
    "chat": lambda client: OpenAIChatCompletionsModel("scripted", client),
    "responses": lambda client: OpenAIResponsesModel("scripted", client),
}
EVERY_API = pytest.mark.parametrize("api", APIS.values(), ids=APIS.keys())


def run_agents(
    gateway: GatewayProcess, api: Api, make: Callable[[agents.Model], Agent[Any]], *, streams: bool
) -> agents.RunResult | agents.RunResultStreaming:
    async def session() -> agents.RunResult | agents.RunResultStreaming:
        async with AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0
        ) as client:
            agent = make(api(client))
            if not streams:
                return await Runner.run(agent, QUESTION)
            result = Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return result

    return asyncio.run(session())


@EVERY_API
@pytest.mark.parametrize("streams", [False, True])
def test_openai_agents_with_tools_and_an_output_type(
    engine: ScriptedEngine, gateway: GatewayProcess, api: Api, streams: bool
) -> None:
    weather_session(engine)
    result = run_agents(
        gateway,
        api,
        lambda model: Agent(name="Reporter", model=model, tools=[weather], output_type=Report),
        streams=streams,
    )
    assert result.final_output == Report(city="Oslo", celsius=4)
    assert len(engine.generates) == 2


@EVERY_API
@pytest.mark.parametrize("streams", [False, True])
def test_openai_agents_with_a_handoff(
    engine: ScriptedEngine, gateway: GatewayProcess, api: Api, streams: bool
) -> None:
    follows(
        engine,
        ("You pick who answers.", call("transfer_to_reporter", {})),
        ("You report.", call("weather", {"city": "Oslo"})),
        (RAIN, REPORT),
    )

    def triage(model: agents.Model) -> Agent[Any]:
        reporter = Agent(
            name="Reporter",
            instructions="You report.",
            model=model,
            tools=[weather],
            output_type=Report,
            model_settings=ModelSettings(parallel_tool_calls=False),
        )
        return Agent(
            name="Triage",
            instructions="You pick who answers.",
            model=model,
            handoffs=[reporter],
            output_type=Report,
        )

    result = run_agents(gateway, api, triage, streams=streams)
    assert result.last_agent.name == "Reporter"
    assert result.final_output == Report(city="Oslo", celsius=4)
    assert len(engine.generates) == 3


# ---- LangChain


@langchain_tool
def look_up(city: str) -> str:
    """The weather in a city."""
    assert city == "Oslo"
    return RAIN


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("strict", [None, True])
def test_langchain_with_a_provider_strategy(
    engine: ScriptedEngine, gateway: GatewayProcess, responses: bool, strict: bool | None
) -> None:
    follows(engine, (QUESTION, call("look_up", {"city": "Oslo"})), (RAIN, REPORT))
    model = chat_model(gateway, responses)
    agent = create_agent(
        model, tools=[look_up], response_format=ProviderStrategy(Report, strict=strict)
    )
    asked: Any = {"messages": [{"role": "user", "content": QUESTION}]}
    assert agent.invoke(asked)["structured_response"] == Report(city="Oslo", celsius=4)
    *_, last = agent.stream(asked, stream_mode="values")
    assert last["structured_response"] == Report(city="Oslo", celsius=4)
    assert len(engine.generates) == 4


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_with_a_tool_strategy(
    engine: ScriptedEngine, gateway: GatewayProcess, responses: bool
) -> None:
    report = {"city": "Oslo", "celsius": 4}
    follows(engine, (QUESTION, call("look_up", {"city": "Oslo"})), (RAIN, call("Report", report)))
    agent = create_agent(
        chat_model(gateway, responses), tools=[look_up], response_format=ToolStrategy(Report)
    )
    asked: Any = {"messages": [{"role": "user", "content": QUESTION}]}
    assert agent.invoke(asked)["structured_response"] == Report.model_validate(report)


def chat_model(gateway: GatewayProcess, responses: bool) -> ChatOpenAI:
    return ChatOpenAI(
        model="scripted",
        base_url=f"{gateway.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        use_responses_api=responses,
    )


# ---- instructor


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(engine: ScriptedEngine, gateway: GatewayProcess, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="`make` installs it, no extra does")
    says = call("Report", {"city": "Oslo", "celsius": 4}) if "TOOLS" in mode else REPORT
    follows(engine, (QUESTION, says))
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as inner:
        client = instructor.from_openai(inner, mode=getattr(instructor.Mode, mode))
        report = client.create(
            model="scripted",
            response_model=Report,
            messages=[{"role": "user", "content": QUESTION}],
            max_retries=0,
        )
    assert (report.city, report.celsius) == ("Oslo", 4)
