"""langchain-openai: with_structured_output in its ways, bind_tools, streams, ainvoke, batch."""

import asyncio
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTION = "What is the pressure of the water?"


class Answer(BaseModel):
    """An answer."""

    topic: Literal["water", "oil"] = Field(description="what it is about")
    sure: bool


@tool
def pressure(pipe: Literal["main", "side"]) -> str:
    """The pressure of a pipe."""
    return f"3 bar in the {pipe} pipe"


def main(llm: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            asked = llm.with_structured_output(Answer, method=method, strict=strict)
            assert isinstance(asked.invoke(QUESTION), Answer), method
    both = llm.with_structured_output(Answer, include_raw=True).invoke(QUESTION)
    assert isinstance(both["parsed"], Answer)
    assert both["parsing_error"] is None
    schema = llm.with_structured_output(Answer.model_json_schema(), method="json_schema")
    assert schema.invoke(QUESTION)["topic"] in ("water", "oil")
    parts = list(llm.with_structured_output(Answer).stream(QUESTION))
    assert isinstance(parts[-1], Answer)

    for choice in ("any", "pressure", "required"):
        bound = llm.bind_tools([pressure], tool_choice=choice, parallel_tool_calls=False)
        said = bound.invoke(QUESTION)
        (call,) = said.tool_calls
        assert call["name"] == "pressure"
        result = pressure.invoke(call)
        assert isinstance(result, ToolMessage)
        free = llm.bind_tools([pressure])
        assert isinstance(free.invoke([HumanMessage(QUESTION), said, result]), AIMessage)

    whole = None
    for chunk in llm.bind_tools([pressure], tool_choice="any").stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.tool_calls[0]["name"] == "pressure"
    assert whole.usage_metadata is not None

    texts = [chunk.text for chunk in llm.stream(QUESTION)]
    assert "".join(texts)
    told = llm.batch([QUESTION] * 3, config={"max_concurrency": 3})
    assert all(one.response_metadata["finish_reason"] in ("stop", "length") for one in told)
    assert all(one.usage_metadata["output_tokens"] for one in told)
    scored = llm.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert scored.response_metadata["logprobs"]["content"]
    assert llm.invoke(QUESTION, stop=["."]).text.count(".") == 0

    kept = llm.bind(store=True).invoke(QUESTION)
    stored = llm.root_client.chat.completions.list()
    assert kept.text in [one.choices[0].message.content for one in stored]


async def later(llm: ChatOpenAI) -> None:
    assert (await llm.ainvoke(QUESTION)).text
    assert "".join([chunk.text async for chunk in llm.astream(QUESTION)])
    assert len(await llm.abatch([QUESTION] * 2)) == 2


if __name__ == "__main__":
    model = ChatOpenAI(model="demo", temperature=0, max_tokens=400, seed=1, stream_usage=True)
    main(model)
    asyncio.run(later(model))
