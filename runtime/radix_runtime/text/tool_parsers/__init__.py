"""Parsers of tool calls by model family; other packages add theirs as `radix.tool_parsers`."""

from ...registry import Registry
from .base import ToolParser
from .deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from .glm45 import Glm45Parser
from .gpt_oss import GptOssParser
from .hermes import HermesParser
from .kimi_k2 import KimiK2Parser
from .llama3 import Llama3Parser
from .minimax_m2 import MiniMaxM2Parser
from .mistral import MistralParser
from .qwen3_coder import Qwen3CoderParser

tool_parsers: Registry[type[ToolParser]] = Registry(
    kind="tool call parser",
    group="radix.tool_parsers",
    items={
        "hermes": HermesParser,
        "llama3": Llama3Parser,
        "mistral": MistralParser,
        "qwen3_coder": Qwen3CoderParser,
        "glm45": Glm45Parser,
        "kimi_k2": KimiK2Parser,
        "minimax-m2": MiniMaxM2Parser,
        "deepseekv3": DeepSeekV3Parser,
        "deepseekv31": DeepSeekV31Parser,
        "gpt-oss": GptOssParser,
    },
)
