"""sam.client: agent sessions for any framework that talks to an OpenAI-compatible server.

Owns the names a framework imports. Must never import anything but the standard library: a
framework installs neither SGLang nor torch, and brings its own HTTP client.

    sam = AgentSessions(OpenAI(base_url=...))
    with sam.session("task-7") as task:
        answer = task.create(model="default", messages=messages, tools=tools)
        with task.tool("pytest"):
            result = run_pytest()
"""

from sam.client.sender import SendStats
from sam.client.sessions import AgentSessions, Session, Timing
from sam.client.tool_times import ToolTimes

__all__ = ["AgentSessions", "SendStats", "Session", "Timing", "ToolTimes"]
