"""The chat template of the test models: ChatML with tools.

Owns: the text. Must never render a message differently because of what follows it: agents append
to a conversation, and the rendered prefix has to stay the same for a cache to hit.
"""

CHAT_TEMPLATE = """\
{%- set ns = namespace(system='You are a helpful assistant.', first=0) %}
{%- if messages and messages[0]['role'] == 'system' %}
{%- set ns.system = messages[0]['content'] %}
{%- set ns.first = 1 %}
{%- endif %}
{{- '<|im_start|>system\\n' + (ns.system or '') }}
{%- if tools %}
{{- '\\n\\n# Tools\\nAnswer with a call inside <tool_call></tool_call> to use one of these:' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages[ns.first:] %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{%- set function = call['function'] if call['function'] is defined else call %}
{{- '\\n<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' }}
{%- if function['arguments'] is string %}
{{- function['arguments'] }}
{%- else %}
{{- function['arguments'] | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
