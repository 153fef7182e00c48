"""Agents of several SDKs with two tools, for `record_traffic.py`: ``python sdk_agents.py NAME``."""

import asyncio
import json
import sys

QUESTIONS = ("Add one and two, and look up tree.", "And then?")
SYSTEM = "Use the tools."
FUNCTIONS = {
    "add": {
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
            "required": ["first", "second"],
        },
    },
    "look_up": {
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    },
}


def add(first: int, second: int) -> str:
    """Add two numbers.

    Args:
        first: a number.
        second: another.
    """
    return str(first + second)


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: a word.
    """
    return f"a {word} is a plant"


TOOLS = {"add": add, "look_up": look_up}


def run_tool(name, arguments):
    return TOOLS[name](**arguments)


def hold_chat(complete, write_back):
    """Hold a conversation by Chat Completions.

    Args:
        complete: returns the completion of messages with tools.
        write_back: returns the message of a completion as it is sent back.
    """
    tools = [{"type": "function", "function": {"name": n, **f}} for n, f in FUNCTIONS.items()]
    messages = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            message = complete(messages=messages, tools=tools).choices[0].message
            messages.append(write_back(message))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = run_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_chat(stream=False):
    import openai

    client = openai.OpenAI()

    def complete(**options):
        if not stream:
            return client.chat.completions.create(model="policy", **options)
        with client.chat.completions.stream(model="policy", **options) as events:
            return events.get_final_completion()

    hold_chat(complete, write_back=lambda message: message)


def openai_chat_stream():
    openai_chat(stream=True)


def openai_responses(stream=False, previous=False):
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "name": n, **f} for n, f in FUNCTIONS.items()]
    items = []
    options = {"instructions": SYSTEM, "tools": tools}
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            if stream:
                with client.responses.stream(model="policy", input=items, **options) as events:
                    for _ in events:
                        pass
                    response = events.get_final_response()
            else:
                response = client.responses.create(model="policy", input=items, **options)
            if previous:
                items = []
                options["previous_response_id"] = response.id
            else:
                items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                output = run_tool(call.name, json.loads(call.arguments))
                result = {"type": "function_call_output", "call_id": call.call_id}
                items.append({**result, "output": output})
            if not calls:
                break


def openai_responses_stream():
    openai_responses(stream=True)


def openai_responses_previous():
    openai_responses(previous=True)


def anthropic(stream=False):
    import anthropic as sdk

    client = sdk.Anthropic()
    tools = []
    for name, function in FUNCTIONS.items():
        schema = {"input_schema": function["parameters"]}
        tools.append({"name": name, "description": function["description"], **schema})
    options = {
        "model": "policy",
        "max_tokens": 4096,
        "system": SYSTEM,
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            if stream:
                with client.messages.stream(messages=messages, **options) as events:
                    reply = events.get_final_message()
            else:
                reply = client.messages.create(messages=messages, **options)
            messages.append({"role": "assistant", "content": reply.content})
            results = []
            for block in reply.content:
                if block.type == "tool_use":
                    result = {"type": "tool_result", "tool_use_id": block.id}
                    results.append({**result, "content": run_tool(block.name, block.input)})
            if not results:
                break
            messages.append({"role": "user", "content": results})


def anthropic_stream():
    anthropic(stream=True)


def openai_agents(stream=False, chat=False):
    import agents

    agents.set_tracing_disabled(True)
    if chat:
        agents.set_default_openai_api("chat_completions")
    tools = [agents.function_tool(add), agents.function_tool(look_up)]
    agent = agents.Agent(name="agent", instructions=SYSTEM, tools=tools, model="policy")

    async def run():
        items = []
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            if stream:
                result = agents.Runner.run_streamed(agent, items)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, items)
            items = result.to_input_list()

    asyncio.run(run())


def openai_agents_stream():
    openai_agents(stream=True)


def openai_agents_chat():
    openai_agents(chat=True)


def google_genai(stream=False):
    import os

    from google import genai
    from google.genai import types

    options = types.HttpOptions(base_url=os.environ["GOOGLE_GEMINI_BASE_URL"])
    client = genai.Client(api_key=os.environ["GEMINI_API_KEY"], http_options=options)
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM,
        tools=[add, look_up],
        thinking_config=types.ThinkingConfig(include_thoughts=True),
    )
    chat = client.chats.create(model="policy", config=config)
    for question in QUESTIONS:
        if stream:
            for _ in chat.send_message_stream(question):
                pass
        else:
            chat.send_message(question)


def google_genai_stream():
    google_genai(stream=True)


def langgraph():
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="policy"), tools=[add, look_up], system_prompt=SYSTEM)
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        messages = agent.invoke({"messages": messages})["messages"]


def pydantic_ai(model="openai-chat:policy"):
    from pydantic_ai import Agent

    agent = Agent(model, system_prompt=SYSTEM, tools=[add, look_up])
    history = None
    for question in QUESTIONS:
        history = agent.run_sync(question, message_history=history).all_messages()


def pydantic_ai_anthropic():
    pydantic_ai("anthropic:policy")


def litellm():
    import litellm as sdk

    def complete(**options):
        return sdk.completion(model="openai/policy", **options)

    hold_chat(complete, write_back=lambda message: message.model_dump())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
