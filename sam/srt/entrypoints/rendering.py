"""A chat request rendered in part, by the server's own way from messages to tokens.

Owns which parts are rendered and how a message is swapped. Must never render in another way
than inference does (upstream's handler renders and tokenises), nor change the request or the
handler it was given. Runs on a worker thread.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionMessageGenericParam,
    ChatCompletionMessageUserParam,
    ChatCompletionRequest,
)

from sam.core.ranges import Unrenderable
from sam.srt.entrypoints.segments import Delegate, SegmentEncoder, SplitTokenizer

_MARKS = ("#~#", "~#~")
_FILLER = "Go on."
_MAX_TAIL = 3


class ChatWindow:
    """`sam.core.ranges.Window` of one chat request.

    `handler` is the OpenAIServingChat that would serve it. `tokens` are those of the full
    window where they are known. What has no token ids before the engine sees it (media,
    a prompt that is no chat) is Unrenderable.
    """

    def __init__(
        self, handler: Any, request: ChatCompletionRequest, tokens: list[int] | None = None
    ) -> None:
        # The handler keeps what it learned about the last conversation that it rendered.
        self._handler = copy.copy(handler)
        manager = handler.tokenizer_manager
        self._encoder = SegmentEncoder(manager.tokenizer)
        tokenizer = SplitTokenizer(self._encoder, manager.tokenizer)
        self._handler.tokenizer_manager = Delegate(manager, tokenizer=tokenizer)
        self._request = request.model_copy(update={"agent_hint": None, "kv_hints": None})
        self._tokens = tokens
        self._is_split = False
        self._namespace: dict[str, str] | None = None

    @property
    def namespace(self) -> dict[str, str]:
        """`cache_salt` and `extra_key` of the radix key, where set; known once rendered."""
        if self._namespace is None:
            self._namespace = self._namespace_of(self._request)
        return self._namespace

    @property
    def n_tokenised_chars(self) -> int:
        """Characters that were tokenised so far; parts of the window that came with its tokens,
        and parts that come again, are not."""
        return self._encoder.n_chars

    def full(self) -> list[int]:
        if self._tokens is None:
            refused = self._handler._validate_request(self._request)
            if refused:
                raise Unrenderable(refused)
            self._tokens = self._render(self._request)
            self._is_split = True
        if not self._is_split:
            self._split(self._tokens)
        return self._tokens

    def messages_before(self, number: int) -> list[int]:
        return self._render_head(self._request.messages[:number])

    def other_message(self, number: int) -> tuple[list[int], str]:
        messages = self._as_prompted()
        swapped, mark = _swapped(messages[number])
        later_user = any(message.role == "user" for message in messages[number + 1 :])
        head = [*messages[:number], swapped]
        roles: list[str] = []
        for _ in range(_MAX_TAIL + 1):
            if len(head) != len(messages) and ("user" in roles or not later_user):
                return self._render_head(head), mark
            head.append(_follower(head[-1].role))
            roles.append(head[-1].role)
        raise Unrenderable("no conversation of another length")

    def tools_before(self, number: int) -> list[int]:
        tools = list(self._request.tools or [])[:number]
        update: dict[str, Any] = {"tools": tools or None}
        choice = self._request.tool_choice
        named = getattr(getattr(choice, "function", None), "name", None)
        if not tools or (named and all(tool.function.name != named for tool in tools)):
            update = {"tools": None, "tool_choice": "none"}
        return self._render(self._request.model_copy(update=update))

    def text_of(self, tokens: Sequence[int]) -> str:
        return self._handler.tokenizer_manager.tokenizer.decode(
            list(tokens), skip_special_tokens=False
        )

    def is_markup(self, tokens: Sequence[int]) -> bool:
        text = self._handler.tokenizer_manager.tokenizer.decode(
            list(tokens), skip_special_tokens=True
        )
        return not text.strip()

    def _split(self, tokens: list[int]) -> None:
        """Render the window to learn what its tokens are the tokens of."""
        self._is_split = True
        if not self._encoder.is_usable:
            return
        self._encoder.give(tokens)
        with contextlib.suppress(Unrenderable):
            self._render(self._request)
        self._encoder.give(None)

    def _as_prompted(self) -> list[Any]:
        """The messages as inference takes them: an answer at the end is shown as the user's.

        Source: `OpenAIServingChat._handle_last_assistant_message`.
        """
        messages = list(self._request.messages)
        last = messages[-1]
        text = last.content or ""
        if (
            last.role == "assistant"
            and isinstance(text, str)
            and not self._request.continue_final_message
        ):
            messages[-1] = ChatCompletionMessageUserParam(role="user", content=text)
        return messages

    def _render_head(self, messages: list[Any]) -> list[int]:
        request = self._request.model_copy(
            update={"messages": messages, "continue_final_message": False}
        )
        request._format_add_generation_prompt = False
        return self._render(request)

    def _render(self, request: ChatCompletionRequest) -> list[int]:
        """Token ids of a request; the conversion may change it, so it gets a copy."""
        if request.input_ids is not None:
            raise Unrenderable("the request brings its own input_ids")
        request = request.model_copy()
        kwargs = request.chat_template_kwargs
        request.chat_template_kwargs = dict(kwargs) if kwargs else kwargs
        try:
            converted, _ = self._handler._convert_to_internal_request(request, None)
        except Exception as error:
            raise Unrenderable(f"{type(error).__name__}: {error}") from None
        tokens = converted.input_ids
        if not isinstance(tokens, list) or converted.image_data or converted.audio_data:
            raise Unrenderable("the prompt has no token ids before the engine sees it")
        return tokens

    def _namespace_of(self, request: ChatCompletionRequest) -> dict[str, str]:
        """Source: `sglang.srt.managers.schedule_batch.Req.__init__`, for `extra_key`."""
        extra_key = request.extra_key or ""
        salt = request.cache_salt or ""
        if not isinstance(extra_key, str) or not isinstance(salt, str):
            raise Unrenderable("cache_salt and extra_key must be strings")
        adapter = self._handler._resolve_lora_path(request.model, request.lora_path)
        if adapter:
            extra_key += self._adapter_id(adapter)
        return {k: v for k, v in (("cache_salt", salt), ("extra_key", extra_key)) if v}

    def _adapter_id(self, name: str | list[str | None]) -> str:
        manager = self._handler.tokenizer_manager
        known = manager.lora_registry.get_all_adapters() if manager.enable_lora else {}
        if not isinstance(name, str) or name not in known:
            raise Unrenderable("the LoRA adapter is not loaded")
        return known[name].lora_id


def _swapped(message: Any) -> tuple[Any, str]:
    """A message of the same role that says something else, and what it starts with."""
    content = message.content
    if isinstance(content, list):
        content = next((part.text for part in content if part.type == "text"), "")
    mark = next(m for m in _MARKS if not (content or "").lstrip().startswith(m[0]))
    update: dict[str, Any] = {"content": mark}
    if message.role == "assistant":
        update |= {"tool_calls": None, "reasoning_content": None}
    return message.model_copy(update=update), mark


def _follower(role: str) -> Any:
    if role in ("user", "tool", "function"):
        return ChatCompletionMessageGenericParam(role="assistant", content=_FILLER)
    return ChatCompletionMessageUserParam(role="user", content=_FILLER)
