"""Small chat templates with the essential parts of each model family's own."""

from __future__ import annotations

_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls %}CALLS{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
# a template that requires alternating roles and rejects unknown ones
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<model>"
)
HERMES = _TOOLS + _TURNS.replace(
    "CALLS",
    '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>",
)
THINKING = HERMES.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}",
) + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPEN_THINKING = PLAIN + "<think>\n\n"
XML = _TOOLS + _TURNS.replace(
    "CALLS",
    "\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)
LLAMA = (
    "{# <|start_header_id|> #}"
    "{% if tools is not none %}Respond with "
    '{"name": function name, "parameters": dictionary of argument name and its value}\n'
    "{% endif %}"
    + _TOOLS
    + _TURNS.replace(
        "CALLS",
        '{"name": "{{ call.function.name }}", "parameters": '
        "{{ call.function.arguments | tojson }}}",
    )
)
_MISTRAL_IDS = (
    "{% for m in messages %}{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
MISTRAL = (
    _MISTRAL_IDS
    + _TOOLS
    + _TURNS.replace("CALLS", "[TOOL_CALLS][{{ call.function | tojson }}]{{ call.id }}")
)
MISTRAL_NAMED = _TOOLS + _TURNS.replace(
    "CALLS", "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
)
PHI = (
    "{% for message in messages %}{% if message['tools'] %}<|system|>{{ message['content'] }}"
    "<|tool|>{{ message['tools'] }}<|/tool|><|end|>{% else %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}<|assistant|>"
)
# arguments must be text
TEXT_ARGUMENTS = _TOOLS + _TURNS.replace(
    "CALLS", "{{ '<tool_call>' + call.function.arguments + '</tool_call>' }}"
)

FAMILIES = {
    "described": PLAIN,
    "hermes": HERMES,
    "thinking": THINKING,
    "open-thinking": OPEN_THINKING,
    "xml": XML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-named": MISTRAL_NAMED,
    "phi": PHI,
}
