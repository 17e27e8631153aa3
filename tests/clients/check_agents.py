"""OpenAI's Agents SDK over Chat Completions: a tool is called and its result read, streams, a form
of the answer, a hand-over to another agent."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.items import ToolCallItem, ToolCallOutputItem
from openai import AsyncOpenAI
from pydantic import BaseModel

asked_for: list[str] = []


@function_tool
def pressure(pipe: Literal["main", "side"]) -> str:
    """The pressure of a pipe."""
    asked_for.append(pipe)
    return f"3 bar in the {pipe} pipe"


class Answer(BaseModel):
    topic: Literal["water", "oil"]
    sure: bool


async def main() -> None:
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("demo", openai_client=AsyncOpenAI())
    once = ModelSettings(tool_choice="required", max_tokens=150, temperature=0, include_usage=True)
    question = "What is the pressure of the water?"
    agent = Agent("reader", instructions="Answer briefly.", model=model, tools=[pressure],
                  model_settings=once)  # fmt: skip
    result = await Runner.run(agent, question, max_turns=6)
    kinds = [type(item) for item in result.new_items]
    assert ToolCallItem in kinds
    assert ToolCallOutputItem in kinds
    assert asked_for
    assert result.final_output is not None
    assert result.context_wrapper.usage.output_tokens

    before = len(asked_for)
    streamed = Runner.run_streamed(agent, question, max_turns=6)
    seen = [event.type async for event in streamed.stream_events()]
    assert {"raw_response_event", "run_item_stream_event"} <= {*seen}
    assert len(asked_for) > before
    assert streamed.final_output is not None

    formed = Agent("former", model=model, output_type=Answer,
                   model_settings=ModelSettings(max_tokens=150))  # fmt: skip
    assert isinstance((await Runner.run(formed, question)).final_output, Answer)

    first = Agent("desk", model=model, handoffs=[handoff(formed)], model_settings=once)
    handed = await Runner.run(first, question, max_turns=4)
    assert handed.last_agent is formed
    assert isinstance(handed.final_output, Answer)

    follow = await Runner.run(formed, [*result.to_input_list(), {"role": "user", "content": "So?"}])
    assert isinstance(follow.final_output, Answer)


if __name__ == "__main__":
    asyncio.run(main())
