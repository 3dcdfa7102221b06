"""Ranges of messages and tools become spans of tokens, or a reason; in six template styles.

Checked against renderings made here with the tokenizer alone, not by the code under test.
"""

import random
import struct

import pytest

pytest.importorskip("sglang")

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from test_ranges_parts import STYLES, chat_handler, tool

from sam.core.ranges import (
    RangeResolver,
    Unrenderable,
    clamp_range,
    common_prefix,
    pack_tokens,
)
from sam.core.validation import HintError
from sam.srt.entrypoints.rendering import ChatWindow

RESOLVED_STYLES = [name for name in STYLES if name != "countdown"]


def conversation(rng, style):
    """Messages with texts that occur once, in an order that the style can render."""
    names = iter(f"w{i}x{rng.randrange(10**6)}" for i in range(1_000))

    def say(role, **more):
        return {"role": role, "content": f"{next(names)} {'pad ' * rng.randrange(12)}end"} | more

    messages = [say("system")] if style.system and rng.random() < 0.7 else []
    for _ in range(rng.randint(1, 4)):
        messages.append(say("user"))
        for i in range(rng.randint(0, 2) if style.tools else 0):
            calls = [
                {
                    "id": f"c{i}{j}",
                    "type": "function",
                    "function": {"name": next(names), "arguments": '{"x": 1}'},
                }
                for j in range(rng.randint(1, 2))
            ]
            thought = say("assistant")["content"]
            messages.append(say("assistant", tool_calls=calls, reasoning_content=thought))
            messages += [say("tool", tool_call_id=call["id"]) for call in calls]
        messages.append(say("assistant"))
    if style.turns or rng.random() < 0.8:
        messages.append(say("user"))
    tools = [tool(next(names)) for _ in range(rng.randint(1, 4))] if style.tools else None
    return messages, tools


class Case:
    """One conversation in one style."""

    def __init__(self, name, messages, tools=None, **fields):
        self.style, self.handler = STYLES[name], chat_handler(name)
        self.tokenizer = self.handler.tokenizer_manager.tokenizer
        self.messages, self.tools = messages, tools
        self.request = ChatCompletionRequest(messages=messages, tools=tools, model="m", **fields)
        self.window = ChatWindow(self.handler, self.request)
        self.full = self.window.full()
        self.resolver = RangeResolver(
            self.window, n_messages=len(messages), n_tools=len(tools or ())
        )

    def resolve(self, *args):
        return self.resolver.resolve(*args)

    def reason(self, *args):
        with pytest.raises(HintError) as error:
            self.resolver.resolve(*args)
        return error.value.reason.value

    def render(self, messages, tools, generation=False):
        """Text by the tokenizer alone, or None where the template refuses."""
        plain = ChatCompletionRequest(messages=messages, tools=tools, model="m")
        as_dicts = [m.model_dump() | {"content": m.content or ""} for m in plain.messages]
        for m in as_dicts:
            for call in m.get("tool_calls") or []:
                call["function"]["arguments"] = {"x": 1}
        try:
            return self.tokenizer.apply_chat_template(
                as_dicts,
                tools=[t.model_dump() for t in plain.tools or []] or None,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except Exception:
            return None

    def text(self, tokens):
        return self.tokenizer.decode(tokens)

    def words_of(self, message):
        """What of a message stands at its place in the rendering."""
        if message["role"] in self.style.moves:
            return []
        if message.get("tool_calls") and self.style.only_calls:
            return [message["tool_calls"][0]["function"]["name"]]
        return [message["content"].split()[0]]


def check_span(case, span, start, end):
    full = case.full
    assert struct.unpack(f"<{len(full)}i", span.token_ids) == tuple(full)
    before, after = case.text(full[: span.start]), case.text(full[span.start :])
    for number, message in enumerate(case.messages):
        for word in case.words_of(message):
            inside = number >= start
            assert (word in after) == inside and (word in before) != inside, (number, word)
    if span.end is not None:
        kept = case.text(full[span.end :])
        for message in case.messages[end:]:
            assert all(word in kept for word in case.words_of(message))


@pytest.mark.parametrize("name", RESOLVED_STYLES)
@pytest.mark.parametrize("seed", range(12))
def test_message_ranges(name, seed):
    """A cut window that the full one continues ends exactly where the range starts; any other
    answer keeps all of the messages before the range and nothing of those in it."""
    rng = random.Random(f"{name}-{seed}")
    case = Case(name, *conversation(rng, STYLES[name]))
    n, resolved = len(case.messages), 0
    text = case.text(case.full)
    for start in range(n):
        end = rng.choice([None, n, n + 90, rng.randint(start + 1, n)])
        try:
            span = case.resolve("messages", start, end)
        except HintError as error:
            assert error.reason.value == "unresolvable_range" and name == "mistral"
            continue
        resolved += 1
        assert (span.end is None) == (end is None or end >= n)
        head = case.render(case.messages[:start], case.tools)
        if head is not None and text.startswith(head):
            tokens = case.tokenizer.encode(head, add_special_tokens=False)
            assert span.start == common_prefix(case.full, tokens)
        check_span(case, span, start, n if end is None else end)
    assert resolved >= n - 1


@pytest.mark.parametrize("name", RESOLVED_STYLES)
@pytest.mark.parametrize("seed", range(8))
def test_tool_ranges_start_at_the_first_changed_token(name, seed):
    rng = random.Random(f"tools-{name}-{seed}")
    case = Case(name, *conversation(rng, STYLES[name]))
    if not case.tools:
        assert case.reason("tools", 0, None) == "empty_range"
        return
    for start in range(len(case.tools)):
        span = case.resolve("tools", start, rng.choice([None, start + 1, 99]))
        messages = case.messages
        if messages[-1]["role"] == "assistant":
            messages = [*messages[:-1], messages[-1] | {"role": "user"}]
        without = case.render(messages, case.tools[:start] or None, generation=True)
        tokens = case.tokenizer.encode(without, add_special_tokens=False)
        assert span.end is None
        assert span.start == common_prefix(case.full, tokens) < len(case.full)
        name_of = case.tools[start]["function"]["name"]
        assert name_of in case.text(case.full[span.start :])


@pytest.mark.parametrize("seed", range(4))
def test_a_template_that_rewrites_history_is_never_guessed(seed):
    rng = random.Random(seed)
    case = Case("countdown", *conversation(rng, STYLES["countdown"]))
    for start in range(len(case.messages)):
        assert case.reason("messages", start, None) == "unresolvable_range"


@pytest.mark.parametrize("start", range(3))
def test_rewritten_history_is_seen_in_short_conversations_too(start):
    case = Case("countdown", [{"role": "user", "content": text} for text in "abc"])
    assert case.reason("messages", start, None) == "unresolvable_range"


def test_a_template_that_does_not_render_tools_has_nothing_to_drop():
    case = Case("gemma", [{"role": "user", "content": "q"}], [tool("a")])
    assert case.reason("tools", 0, None) == "empty_range"


def test_a_conversation_that_the_template_refuses():
    case = Case("gemma", [{"role": "user", "content": "q"}])
    wrong = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]
    case.window = ChatWindow(
        case.handler, ChatCompletionRequest(messages=wrong, model="m")
    )
    resolver = RangeResolver(case.window, n_messages=2, n_tools=0)
    with pytest.raises(HintError, match="unresolvable_range.*take turns"):
        resolver.resolve("messages", 1, None)


def test_the_default_system_turn_stays():
    case = Case("qwen", [{"role": "user", "content": "hello"}])
    span = case.resolve("messages", None, None)
    assert case.text(case.full[: span.start]).startswith("<|im_start|>system\nYou are")
    assert case.text(case.full[span.start :]).startswith("hello<|im_end|>")


def test_dropped_reasoning_does_not_move_the_cut():
    """Cut off, the old answer would show its reasoning again; in the window it does not."""
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer", "reasoning_content": "long " * 50},
        {"role": "user", "content": "second"},
    ]
    case = Case("qwen", messages)
    span = case.resolve("messages", 2, 3)
    assert "long" not in case.text(case.full)
    assert case.text(case.full[: span.start]).endswith("answer<|im_end|>\n<|im_start|>user\n")


def test_one_of_two_merged_tool_turns():
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call | {"id": i} for i in "ab"]},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
    ]
    case = Case("qwen", messages, [tool("f")])
    span = case.resolve("messages", 3, 4)
    assert case.text(case.full[: span.start]).endswith("one\n</tool_response>")
    assert case.text(case.full[span.start :]).startswith("\n<tool_response>\ntwo")


def test_the_window_is_what_inference_computes():
    """Generation prompt, converted last answer, template arguments and all."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for fields in ({}, {"chat_template_kwargs": {"x": 1, "reasoning_effort": "low"}}):
        case = Case("qwen", messages, **fields)
        request = ChatCompletionRequest(messages=messages, model="m", **fields)
        obj, _ = case.handler._convert_to_internal_request(request)
        assert case.full == obj.input_ids
        assert case.text(case.full).endswith("user\na<|im_end|>\n<|im_start|>assistant\n")


def test_the_request_is_left_as_it_was():
    fields = {"chat_template_kwargs": {"reasoning_effort": "low"}, "agent_hint": {"a": 1}}
    case = Case("qwen", [{"role": "user", "content": "q"}], [tool("f")], **fields)
    before = case.request.model_dump()
    case.resolve("messages", 0, None)
    case.resolve("tools", 0, None)
    assert case.request.model_dump() == before


def test_a_named_tool_choice_renders_that_tool_only():
    choice = {"type": "function", "function": {"name": "b"}}
    tools = [tool("a"), tool("b")]
    case = Case("qwen", [{"role": "user", "content": "q"}], tools, tool_choice=choice)
    first = case.resolve("tools", 0, None)
    assert '"name": "b"' in case.text(case.full[first.start :])
    assert first.start == case.resolve("tools", 1, None).start


def test_namespace_and_what_has_no_tokens():
    message = [{"role": "user", "content": "q"}]
    case = Case("qwen", message, cache_salt="salt", extra_key="key")
    assert case.window.namespace == {"cache_salt": "salt", "extra_key": "key"}
    assert Case("qwen", message).window.namespace == {}
    for fields in ({"input_ids": [1, 2]}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}):
        request = ChatCompletionRequest(messages=message, model="m", **fields)
        with pytest.raises(Unrenderable):
            ChatWindow(chat_handler("qwen"), request).full()
    request = ChatCompletionRequest(messages=message, model="m:adapter")
    with pytest.raises(Unrenderable, match="LoRA"):
        _ = ChatWindow(chat_handler("qwen"), request).namespace


@pytest.mark.parametrize(
    ("start", "end", "n", "expected"),
    [
        (None, None, 3, (0, 3)),
        (1, 99, 3, (1, 3)),
        (None, 2, 3, (0, 2)),
        (2, None, 3, (2, 3)),
        (3, None, 3, None),
        (3, 99, 3, None),
        (None, None, 0, None),
    ],
)
def test_clamping(start, end, n, expected):
    if expected is None:
        with pytest.raises(HintError, match="empty_range"):
            clamp_range(start, end, n)
    else:
        assert clamp_range(start, end, n) == expected


@pytest.mark.parametrize("n", [0, 1, 1_023, 1_024, 1_025, 5_000])
def test_common_prefix(n):
    same = list(range(n))
    assert common_prefix([*same, 1, 2], [*same, 2]) == n
    assert common_prefix(same, [*same, 7]) == common_prefix([*same, 7], same) == n
    assert pack_tokens(same) == struct.pack(f"<{n}i", *same)
