"""The real openJiuwen client as a process that takes commands: JSON lines in, JSON lines out.

Runs in the client's own environment, on whatever version is installed there. The model behind
the server has random weights, so what an agent *decides* is scripted here: after each real
answer the script puts the tool calls of that turn. Requests, hints, their moments and their
time-outs are the client's own. Must never import this project.
"""

import asyncio
import json
import os
import sys
import traceback
import urllib.request
from collections import deque

REPLIES = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # the client logs to stdout

from openjiuwen.core.foundation.llm import (  # noqa: E402
    AssistantMessageChunk,
    Model,
    ModelClientConfig,
    ModelRequestConfig,
    ToolCall,
)
from openjiuwen.core.foundation.tool import ToolCard, tool  # noqa: E402
from openjiuwen.core.runner import Runner  # noqa: E402
from openjiuwen.core.session.agent import create_agent_session  # noqa: E402
from openjiuwen.core.single_agent import AgentCard, ReActAgent, ReActAgentConfig  # noqa: E402

NATIVE = "native"  # script entry: the server itself must call a tool
_ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "enum": ["1", "2"]},
        "b": {"type": "string", "enum": ["3", "4"]},
    },
    "required": ["a", "b"],
}
_TASK = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "what to find out"}},
    "required": ["query"],
}


def call_of(entry, number):
    name, arguments = entry
    return ToolCall(
        id=f"call_{number}_{name}",
        type="function",
        name=name,
        arguments=json.dumps(arguments),
        index=0,
    )


TOLD = []


def keep_what_the_server_tells():
    """Note the `kv_hints` of answers on the way to the client, which does not look at them."""
    try:
        from openjiuwen.core.foundation.llm.model_clients import ascend_affinity_model_client
    except ImportError:
        from openai.resources.chat.completions import AsyncCompletions

        owner, name = AsyncCompletions, "create"
    else:
        owner = ascend_affinity_model_client.AscendAffinityModelClient
        name = "_make_ascend_affinity_request"
    original = getattr(owner, name)

    async def call(*args, **kwargs):
        reply = await original(*args, **kwargs)
        told = reply.get("kv_hints") if isinstance(reply, dict) else None
        told = told or getattr(reply, "kv_hints", None)
        if told:
            TOLD.append(told)
        return reply

    setattr(owner, name, call)


class ScriptedModel(Model):
    """`script`: per call None (an answer), NATIVE, or (tool name, arguments)."""

    script = deque()
    n_calls = 0

    async def invoke(self, messages, **kwargs):
        entry = self._next(kwargs.get("tools"))
        if entry == NATIVE:
            kwargs |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 96}
        answer = await super().invoke(messages, **kwargs)
        if entry and entry != NATIVE:
            answer.tool_calls = [call_of(entry, self.n_calls)]
        elif not entry:
            answer.tool_calls = None
            answer.content = answer.content or "done"
        return answer

    async def stream(self, messages, **kwargs):
        entry = self._next(kwargs.get("tools"))
        async for chunk in super().stream(messages, **kwargs):
            yield chunk
        if entry:
            calls = [call_of(entry, self.n_calls)]
            yield AssistantMessageChunk(content="", tool_calls=calls)

    def _next(self, tools):
        self.n_calls += 1
        return self.script.popleft() if tools and self.script else None


class Driver:
    def __init__(self, url, tokens):
        self.url, self.seen = url, []
        self.client_config = ModelClientConfig(
            client_provider="AscendAffinity",
            api_key="sk-client",
            api_base=f"{url}/v1",
            verify_ssl=False,
            max_retries=1,
        )
        self.request_config = ModelRequestConfig(
            model_name="default", max_tokens=tokens, temperature=0.0
        )
        self.model = Model(self.client_config, self.request_config)
        self.agents, self.sessions, self.tools = {}, {}, {}
        self.runtime = None

    def new_model(self):
        model = ScriptedModel(self.client_config, self.request_config)
        model.script = deque()
        return model

    async def invoke(self, messages, **kwargs):
        """One inference at model level."""
        answer = await self.model.invoke(messages, **kwargs)
        usage = answer.usage_metadata
        return {"text": answer.content, "usage": usage.model_dump() if usage else None}

    async def stream(self, messages, **kwargs):
        """One streamed inference, closed after `stop_after` chunks if given."""
        stop_after = kwargs.pop("stop_after", None)
        chunks = self.model.stream(messages, **kwargs)
        texts = []
        async for chunk in chunks:
            texts.append(chunk.content or "")
            if stop_after is not None and len(texts) >= stop_after:
                await chunks.aclose()
                break
        return {"text": "".join(texts), "n_chunks": len(texts)}

    async def kvc(self, action, **kwargs):
        """`evict_kvc`, `offload_kvc` or `prefetch_kvc`, in the time the client's own lifecycle
        gives it."""
        target = kwargs.get("target", "session")
        kwargs.setdefault("timeout", _action_timeout(action, target))
        return await getattr(self.model, f"{action}_kvc")(**kwargs)

    async def signals(self, actions, session_id, parent_session_id):
        """Background signals of the older client, in order, and their results."""
        from openjiuwen.core.foundation.kv_cache import kv_cache_session_actions as module

        for action in actions:
            module.dispatch_session_kv_cache_signal(
                self.model, action, session_id=session_id, parent_session_id=parent_session_id
            )
        return await asyncio.gather(*module._SESSION_SIGNAL_TASKS)

    async def react(self, name, system, tools=(), subagents=(), **options):
        """A ReAct agent; `subagents` are names of agents made before."""
        from openjiuwen.core.context_engine import ContextEngineConfig

        about = {"description": f"Agent {name}", "input_params": _TASK}
        agent = ReActAgent(card=AgentCard(id=name, name=name, **about))
        config = ReActAgentConfig(
            model_name="default",
            max_iterations=8,
            model_client_config=self.client_config,
            model_config_obj=self.request_config,
        )
        config.configure_model("default")
        config.configure_prompt_template([{"role": "system", "content": system}])
        config.configure_kv_cache_affinity(enable_kv_cache_affinity=True)
        if options.get("window_rounds"):
            config.context_engine_config = ContextEngineConfig(
                max_context_message_num=None,
                default_window_round_num=options["window_rounds"],
            )
        if options.get("compress_after"):
            config.context_processors = self._compressor(options["compress_after"])
        agent.configure(config)
        model = self.new_model()
        agent.set_llm(model)
        for tool_name in tools:
            self._add_tool(agent, tool_name)
        for child in subagents:
            agent.ability_manager.add(self.agents[child][0].card)
        Runner.resource_mgr.add_agent(agent.card, lambda: agent)
        self.agents[name] = (agent, model)

    def _compressor(self, threshold):
        from openjiuwen.core.context_engine.processor.forked import activate
        from openjiuwen.core.context_engine.processor.forked.compressor.dialogue_compressor import (
            DialogueCompressorConfig,
        )

        activate()
        config = DialogueCompressorConfig(
            trigger_context_ratio=threshold,
            min_target_context_ratio=0.0,
            model=self.request_config,
            model_client=self.client_config,
            enable_kv_cache_affinity=True,
        )
        return [("DialogueCompressor", config)]

    def _add_tool(self, agent, name):
        if name not in self.tools:
            self.tools[name] = self._plain_tool(name)
            Runner.resource_mgr.add_tool(self.tools[name])
        agent.ability_manager.add(self.tools[name].card)

    async def deep(self, name, system, subagents, workspace):
        """A DeepAgent whose task tool starts `subagents`."""
        from openjiuwen.core.kv_cache import KVCacheAffinityConfig
        from openjiuwen.harness.factory import create_deep_agent
        from openjiuwen.harness.schema.config import SubAgentConfig

        model = self.new_model()
        specs, children = [], {}
        for child in subagents:
            children[child] = self.new_model()
            specs.append(
                SubAgentConfig(
                    agent_card=AgentCard(id=child, name=child, description=f"Does {child}"),
                    system_prompt=f"You are {child}. {system}",
                    model=children[child],
                    max_iterations=4,
                    tools=[self._plain_tool("look")],
                )
            )
        agent = create_deep_agent(
            model,
            card=AgentCard(id=name, name=name, description="leads"),
            system_prompt=system,
            subagents=specs,
            max_iterations=8,
            workspace=workspace,
            enable_read_image_multimodal=False,
            kv_cache_affinity_config=KVCacheAffinityConfig(enable_kv_cache_affinity=True),
        )
        self.agents[name] = (agent, model)
        for child, child_model in children.items():
            self.agents[child] = (None, child_model)

    def _plain_tool(self, name):
        card = ToolCard(id=name, name=name, description=f"Tool {name}", input_params=_ADD)

        @tool(card=card)
        def run(a="1", b="3", **_):
            self.seen.append(self._sessions_now())
            return f"the result of {name} is {a}{b}"

        return run

    def _sessions_now(self):
        with urllib.request.urlopen(f"{self.url}/sessions?limit=1000", timeout=20) as response:
            return json.load(response)["sessions"]

    async def during_tools(self):
        """What the server said of its sessions while each tool ran, since the last call."""
        seen, self.seen = self.seen, []
        return seen

    async def told(self):
        """`kv_hints` of the answers since the last call, in order (streams apart)."""
        told = list(TOLD)
        TOLD.clear()
        return told

    async def run(self, agent, session, query, scripts=None, stream=False):
        """One turn of an agent in a session; `scripts` by agent name."""
        for name, script in (scripts or {}).items():
            entries = [tuple(e) if isinstance(e, list) else e for e in script]
            self.agents[name][1].script = deque(entries)
        target = self.agents[agent][0]
        held = self._session(session, target.card)
        inputs = {"query": query, "conversation_id": session}
        if stream:
            chunks = [c async for c in Runner.run_agent_streaming(target, inputs, session=held)]
            result, n_chunks = None, len(chunks)
        else:
            result, n_chunks = await Runner.run_agent(target, inputs, session=held), 0
        calls = {name: model.n_calls for name, (_, model) in self.agents.items()}
        return {"result": str(result)[:2_000], "n_chunks": n_chunks, "calls": calls}

    def _session(self, session_id, card):
        if session_id not in self.sessions:
            kwargs = {}
            if self._runtime() is not None:
                kwargs["kv_cache_runtime"] = self._runtime()
            self.sessions[session_id] = create_agent_session(
                session_id=session_id, card=card, **kwargs
            )
        return self.sessions[session_id]

    def _runtime(self):
        if self.runtime is None:
            try:
                from openjiuwen.core.kv_cache import KVCacheRuntime
            except ImportError:
                return None
            self.runtime = KVCacheRuntime()
        return self.runtime

    async def lifecycle(self, session, do):
        """`prepare`, `suspend` or `release` of a session, and the wait for what that started."""
        done = await getattr(self.sessions[session], f"{do}_kvc")()
        if self.runtime is not None:
            tasks = list(self.runtime._tasks)
            await asyncio.gather(*tasks, return_exceptions=True)
        if do == "release":
            del self.sessions[session]
        return done

    async def offload_switches(self):
        """Scopes whose offload the client has switched off for good."""
        if self.runtime is None:
            return []
        return [key.cache_id for key, s in self.runtime._action_states.items() if s.fail_open]

    async def close(self):
        if self.runtime is not None:
            await self.runtime.close()
            self.runtime = None


def _action_timeout(action, target):
    try:
        from openjiuwen.core.kv_cache import resolve_kvc_action_timeout
    except ImportError:
        from openjiuwen.core.foundation.kv_cache.kv_cache_config import resolve_kvc_action_timeout
    return resolve_kvc_action_timeout(action, target)


async def main():
    keep_what_the_server_tells()
    driver = Driver(sys.argv[1], int(sys.argv[2]))
    await Runner.start()
    REPLIES.write(json.dumps({"ready": True}) + "\n")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        try:
            method = getattr(driver, command.pop("do_"))
            reply = {"value": await method(**command)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        REPLIES.write(json.dumps(reply) + "\n")
    await Runner.stop()


if __name__ == "__main__":
    asyncio.run(main())
