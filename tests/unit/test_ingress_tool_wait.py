"""An answer that calls a tool is told to the scheduler: from SGLang's own chat handler and
parsers over canned output, streaming and not."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.runtime_context import get_context
from test_ingress_parts import Server, caller, chat, envelope
from test_ranges_parts import chat_handler, tool

from sam.srt.entrypoints.tool_wait import StreamedAnswer, install_tool_wait

install_tool_wait()

CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO_CALLS = CALL % "weather" + "\n" + CALL % "search"
PLAIN = "It will not rain."
FAKED = '"tool_calls":[{"function":{"name":"x"}}] "finish_reason":"tool_calls"'


class Answering(Server):
    """A server whose model says `text`, in pieces of `step` characters."""

    def __init__(self, text, *, finish="stop", step=7, **config):
        super().__init__(handler=chat_handler("qwen"), **config)
        self.text, self.finish, self.step = text, finish, step
        real = self.handler.tokenizer_manager
        for name, value in vars(real).items():
            if name != "rid_to_state":
                vars(self.manager).setdefault(name, value)
        self.manager.generate_request = self._generate_request
        self.manager.kv_hint_ingress = self.ingress
        self.manager.create_abort_task = lambda obj: None
        self.manager.request_logger = SimpleNamespace(log_requests=False)

    async def _generate_request(self, obj, raw_request):
        """Source: `TokenizerManager.generate_request`."""
        await self.ingress.intercept_generate_request(obj, raw_request)
        obj.normalize_batch_and_arguments()
        lengths = range(self.step, len(self.text) + self.step, self.step) if obj.stream else [-1]
        for length in lengths:
            text = self.text if length < 0 else self.text[:length]
            ended = len(text) == len(self.text)
            finish = {"type": self.finish, "matched": None} if ended else None
            meta = {"id": "r", "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": 5}
            item = {"text": text, "meta_info": meta | {"weight_version": "v"}, "index": 0}
            several = obj.sampling_params if isinstance(obj.sampling_params, list) else [0]
            yield item if len(several) == 1 else [item] * len(several)
            await asyncio.sleep(0)

    def ask(self, hint=None, *, raw=None, parser="qwen25", **fields):
        """The whole answer: a ChatCompletionResponse or the events of a stream."""
        tools = [tool("weather"), tool("search")]
        request = chat(hint, **{"tools": tools, "stream": False} | fields)
        with get_context().override_server_args(model_path="none", tool_call_parser=parser):
            handler = OpenAIServingChat(self.manager, self.handler.template_manager)
            return asyncio.run(self._answer(handler, request, raw or caller()))

    async def _answer(self, handler, request, raw):
        response = await handler.handle_request(request, raw)
        if not request.stream:
            told_early = list(self.sent)
            await asyncio.sleep(0)
            assert told_early == []
            return response
        return [chunk async for chunk in response.body_iterator]

    def told(self):
        return [
            (action.action_type, action.action_version, action.payload)
            for one in self.sent
            for action in one.actions
        ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "name"), [(CALL % "search", "search"), (PLAIN + TWO_CALLS, "weather")]
)
def test_a_tool_call_is_told_with_the_first_name(stream, text, name):
    before = time.time()
    server = Answering(text)
    server.ask({"session_id": "s", "parent_session_id": "p"}, stream=stream)
    ((action_type, version, payload),) = server.told()
    assert (action_type, version) == ("sam.answered", "0.1")
    assert before <= payload.pop("time_s") <= time.time()
    assert payload == {
        "session_id": "s",
        "tenant": "anonymous",
        "finish_reason": "tool_calls",
        "tool_name": name,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [PLAIN, FAKED, json.dumps(FAKED), "<tool_call>\n{"])
def test_other_answers_are_not_told(stream, text):
    server = Answering(text)
    server.ask({"session_id": "s"}, stream=stream)
    assert not server.told()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_short_is_no_tool_wait(stream):
    server = Answering(CALL % "weather", finish="length")
    server.ask({"session_id": "s"}, stream=stream)
    assert not server.told()


@pytest.mark.parametrize("stream", [False, True])
def test_whatever_binds_a_session_counts_and_only_that(stream):
    bound = [
        {"prompt_cache_key": "s"},
        {"session_id": "s"},
        {"kv_hints": envelope("session.bind", session_id="s")},
    ]
    for fields in bound:
        server = Answering(CALL % "weather")
        server.ask(stream=stream, raw=caller("Bearer a"), **fields)
        ((_, _, payload),) = server.told()
        assert payload["session_id"] == "s" and payload["tenant"].startswith("key-")
    unbound = [{}, {"hint": {"session_id": 5}}, {"kv_hints": envelope("vendor.other")}]
    for fields in unbound:
        server = Answering(CALL % "weather")
        server.ask(stream=stream, **fields)
        assert not server.told()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen25", CALL % "search"),
        ("pythonic", json.dumps([{"name": "search", "parameters": {}}, {"name": "weather"}])),
    ],
)
def test_required_calls_are_told_too(parser, text, stream):
    """Natively, or as a list in JSON where the parser has no grammar of its own."""
    server = Answering(text)
    server.ask({"session_id": "s"}, parser=parser, stream=stream, tool_choice="required")
    ((_, _, payload),) = server.told()
    assert payload["tool_name"] == "search"


def test_several_samples_are_told_once():
    server = Answering(CALL % "weather")
    server.ask({"session_id": "s"}, n=3)
    assert len(server.told()) == 1


def test_it_is_told_before_the_clients_next_request_can_come():
    """The event that ends the answer goes out first; the loop's next turn tells."""

    async def run():
        server = Answering(CALL % "weather")
        request = chat({"session_id": "s"}, tools=[tool("weather")], stream=True)
        with get_context().override_server_args(model_path="none", tool_call_parser="qwen25"):
            handler = OpenAIServingChat(server.manager, server.handler.template_manager)
            response = await handler.handle_request(request, caller())
            async for chunk in response.body_iterator:
                if '"finish_reason":"tool_calls"' in chunk:
                    assert not server.sent
                    await asyncio.sleep(0)
                    assert len(server.sent) == 1
                    break
            await response.body_iterator.aclose()
        assert len(server.sent) == 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_channel_drops_it_and_counts(stream):
    server = Answering(CALL % "weather", max_in_flight_actions=0)
    answer = server.ask({"session_id": "s"}, stream=stream)
    assert not server.told() and "weather" in str(answer)
    assert server.counts()["rejected_by_reason"] == {"overloaded": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_channel_that_breaks_does_not_break_the_answer(stream):
    server = Answering(CALL % "weather")

    def fail(_):
        raise RuntimeError("scheduler gone")

    server.manager.send_kv_hints = fail
    assert "weather" in str(server.ask({"session_id": "s"}, stream=stream))
    assert server.ingress.dispatch._in_flight.n == 0


def test_the_scheduler_looking_at_it_gives_its_place_back():
    server = Answering(CALL % "weather")
    server.ask({"session_id": "s"})
    assert server.ingress.dispatch._in_flight.n == 1
    server.ingress.on_results(server.sent[0].message_id, [])
    assert server.ingress.dispatch._in_flight.n == 0


def test_answers_are_the_same_with_and_without_a_session():
    answers = [Answering(TWO_CALLS).ask(hint, stream=True) for hint in (None, {"session_id": "s"})]
    contents = [
        [delta_of(chunk) for chunk in chunks if '"kv_hints"' not in chunk] for chunks in answers
    ]
    assert contents[0] == contents[1]


def delta_of(chunk):
    data = chunk.removeprefix("data: ").strip()
    if data == "[DONE]":
        return data
    (choice,) = json.loads(data)["choices"]
    for call in choice["delta"].get("tool_calls") or []:
        call["id"] = bool(call["id"])
    return choice


@pytest.mark.parametrize(
    "chunk", ['data: {"tool_calls":[', '{"choices":[{}],"tool_calls":[]}', '"tool_calls":[1]']
)
def test_unreadable_events_have_no_name(chunk):
    answer = StreamedAnswer()
    assert not answer.ends_with_calls(chunk) and answer.tool_name is None


def test_other_routes_have_no_tool_calls():
    server = Answering(CALL % "weather")
    server.generate(GenerateReqInput(text="x", agent_hint={"session_id": "s"}), caller())
    assert not server.told()
