# ruff: noqa: E501 (a line of a template is a line of it)
"""Chat templates of the families, written out from their public formats.

Short, but a conversation is written as the models of the family write it: roles, reasoning, calls
and the answers of tools."""

from __future__ import annotations

HERMES = """
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

LLAMA3 = """
{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n\\n' }}{% endfor %}
{{- 'Respond with {"name": ..., "parameters": ...}.<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{%- for c in m.tool_calls or [] %}
{%- if not loop.first %}{{ '; ' }}{% endif %}
{{- '{"name": "' + c.function.name + '", "parameters": ' + c.function.arguments | tojson + '}' }}
{%- else %}{{ m.content }}{% endfor %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL = """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_CALLS][' if loop.first else ', ' }}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}
{{- ']' if loop.last else '' }}
{%- endfor %}
{{- '</s>' }}
{%- else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}
{%- endfor %}
"""

MISTRAL_NAMED = """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content }}
{%- elif m.role == 'assistant' %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson }}
{%- endfor %}
{{- '</s>' }}
{%- else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}
{%- endfor %}
"""

QWEN3_CODER = """
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n<function>\\n<name>' + tool.function.name + '</name>\\n</function>' }}{% endfor %}
{{- '\\n</tools>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for key, value in c.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

GLM45 = """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>' + c.function.name + '\\n' }}
{%- for key, value in c.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) }}
{{- '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n<think></think>' }}{% endif %}
{%- endif %}
"""

KIMI_K2 = """
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- else %}
{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_calls_section_begin|>' if loop.first else '' }}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + c.function.arguments | tojson }}
{{- '<|tool_call_end|>' + ('<|tool_calls_section_end|>' if loop.last else '') }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""

MINIMAX_M2 = """
{%- if tools %}{{ ']~b]system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n<tool>' + tool.function | tojson + '</tool>' }}{% endfor %}
{{- '\\n</tools>[e~[\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ ']~b]tool\\n<response>' + m.content + '</response>[e~[\\n' }}
{%- elif m.role == 'assistant' %}
{{- ']~b]ai\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<minimax:tool_call>\\n' if loop.first else '' }}
{{- '<invoke name="' + c.function.name + '">\\n' }}
{%- for key, value in c.function.arguments | items %}
{{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) + '</parameter>\\n' }}
{%- endfor %}
{{- '</invoke>\\n' + ('</minimax:tool_call>' if loop.last else '') }}
{%- endfor %}
{{- '[e~[\\n' }}
{%- else %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}
"""

DEEPSEEK_V3 = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}
{%- elif m.role == 'assistant' %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}
{{- c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{ m.content }}{% endif %}
{%- endfor %}
"""

DEEPSEEK_V31 = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜></think>' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}
{{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking is defined and thinking else '</think>') }}{% endif %}
"""

GPT_OSS = """
{%- if tools %}{{ '<|start|>developer<|message|># Tools\\nnamespace functions {' }}
{%- for tool in tools %}{{ 'type ' + tool.function.name + ' = (_: any) => any;\\n' }}{% endfor %}
{{- '}<|end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- elif m.role == 'assistant' %}
{%- if m.reasoning_content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
{%- endif %}
{%- if m.content %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' }}
{{- c.function.arguments | tojson + '<|call|>' }}
{%- endfor %}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

# By the name of the parser of calls; "mistral 11" is the other form of its family.
TEMPLATES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral 11": MISTRAL_NAMED,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "kimi_k2": KIMI_K2,
    "minimax-m2": MINIMAX_M2,
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "gpt-oss": GPT_OSS,
}

# What ends an answer, which is a token that no parser sees.
ENDS = (
    "<|im_end|>\n", "<|im_end|>", "<|eot_id|>", "</s>", "[e~[\n", "<｜end▁of▁sentence｜>",
    "<|call|>", "<|end|>",
)  # fmt: skip
