"""LangGraph: a graph of a model and its tools, with streamed turns.

    gcore-llm train --rollout.agent.run "command: PYTHON tests/agents/langgraph_tools.py"

PYTHON has langgraph and langchain-openai. The model is found by OPENAI_BASE_URL and OPENAI_API_KEY.
"""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import json
import os
import re
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calc(sum: str) -> str:
    """Work out a sum."""
    total = 0
    for term in re.findall(r"[+-]?\d+", sum):
        total += int(term)
    return str(total)


MODEL = ChatOpenAI(model="policy", streaming=True, max_retries=0).bind_tools([calc])


def ask(state: MessagesState) -> MessagesState:
    return {"messages": [MODEL.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("model", ask)
graph.add_node("tools", ToolNode([calc]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
row = json.loads(Path(os.environ["GCORE_ROW"]).read_text())
try:
    graph.compile().invoke({"messages": [("user", row["prompt"])]}, {"recursion_limit": 6})
except GraphRecursionError:
    print("the policy would not end")
