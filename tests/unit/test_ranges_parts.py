"""SGLang's own chat handler over a real tokenizer, in six styles of chat template and one more.

The templates are written for these tests, after what the models' public formats do.
"""

import functools
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import get_context
from transformers import AutoTokenizer

from sam.testing.tiny_model import build_tiny_model

# Tools in the first system message, a default one, merged tool turns, old reasoning dropped.
QWEN = """\
{%- set ns = namespace(query=-1, body=messages, system='You are a helpful assistant.') %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}
{%- endfor %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif %}
{{- '<|im_start|>system\\n' + ns.system }}
{%- if tools %}{{ '\\n\\n# Tools\\n<tools>' }}
{%- for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}{{ '\\n</tools>' }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.query %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# One header a turn, tools in the system turn, tool results from `ipython`.
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{{ 'Environment: ipython\\nTools:' }}
{%- for t in tools %}{{ '\\n\\n' + (t | tojson(indent=4)) }}{% endfor %}{{ '\\n\\n' }}{% endif %}
{{- (m.content or '') | trim }}
{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
# Tools and the system text before the last user turn, user and assistant in turns only.
MISTRAL = """\
{%- set ns = namespace(last=-1, turn=0, system='') %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}
{{- raise_exception('user and assistant must take turns') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '[TOOL_CALLS] ' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ '</s>' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}
"""
# System first, without a turn; reasoning of all old answers dropped; results after results.
DEEPSEEK = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- if tools %}{{ '\\n\\n## Tools' }}{% for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- set text = (m.content or '').split('</think>')[-1] %}
{{- '<｜Assistant｜>' + text }}
{%- for c in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + (c.function | tojson) }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""
# No system role, no tools, user and model in turns.
GEMMA = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{{- '<bos>' }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and model must take turns') }}{% endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
# Numbers the turns from the end: every new turn rewrites all before it.
COUNTDOWN = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + ' ' + (messages | length - loop.index0) | string + '\\n' }}
{{- (m.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant 0\\n' }}{% endif %}
"""
# No special tokens at all, and a reminder behind everything.
PLAIN = """\
{%- for m in messages %}{{ m.role | upper + ': ' + (m.content or '') + '\\n' }}{% endfor %}
{{- 'Answer briefly.\\n' }}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""


@dataclass(frozen=True)
class Style:
    """`moves`: roles whose text is not rendered where the message stands. `turns`: what does
    not take turns is refused. `only_calls`: a message with calls shows nothing else."""

    template: str
    specials: tuple[str, ...] = ()
    system: bool = True
    tools: bool = True
    moves: tuple[str, ...] = ()
    turns: bool = False
    only_calls: bool = False


STYLES = {
    "qwen": Style(QWEN),
    "llama3": Style(
        LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "mistral": Style(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
        + ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        moves=("system",),
        turns=True,
        only_calls=True,
    ),
    "deepseek": Style(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
        + ("<｜tool▁call▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    "gemma": Style(
        GEMMA,
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        system=False,
        tools=False,
        turns=True,
    ),
    "countdown": Style(COUNTDOWN, tools=False),
    "plain": Style(PLAIN, tools=False),
}


def settings():
    """Server settings that the handler reads while it works."""
    return get_context().override_server_args(model_path="none", tool_call_parser=None)


class Handler(OpenAIServingChat):
    """The real one, which finds its settings published wherever it is called."""

    def _validate_request(self, request):
        with settings():
            return super()._validate_request(request)

    def _convert_to_internal_request(self, request, raw_request=None):
        with settings():
            return super()._convert_to_internal_request(request, raw_request)


@functools.cache
def _model():
    folder = tempfile.TemporaryDirectory(prefix="sam-ranges-")
    return folder, build_tiny_model(f"{folder.name}/model")


@functools.cache
def chat_handler(name):
    """OpenAIServingChat of a style; only the TokenizerManager around it is a stand-in."""
    style = STYLES[name]
    tokenizer = AutoTokenizer.from_pretrained(_model()[1])
    tokenizer.add_special_tokens({"additional_special_tokens": list(style.specials)})
    tokenizer.chat_template = style.template
    hf_config = SimpleNamespace(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    manager = SimpleNamespace(
        tokenizer=tokenizer,
        processor=None,
        model_config=SimpleNamespace(
            get_default_sampling_params=dict, hf_config=hf_config, is_multimodal=False
        ),
        config_value=lambda name: get_context().config_leaf(name),
        server_args=None,
        served_model_name="m",
        enable_lora=False,
    )
    with settings():
        templates = TemplateManager()
        templates.initialize_templates(tokenizer_manager=manager, model_path="none")
        return Handler(manager, templates)


def tool(name):
    function = {"name": name, "description": f"does {name}", "parameters": {"type": "object"}}
    return {"type": "function", "function": function}
