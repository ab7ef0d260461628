"""Fields of other servers' APIs that change nothing here, and those that are not built."""

# One list for all routes: a field that some route has built is taken by that route (protocol.py),
# whatever stands here.

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A field that is known and not built: `why` tells clients. Null and the `neutral` values pass,
    as they ask for what happens anyway."""

    why: str
    neutral: tuple[Any, ...] = ()

    def passes(self, value: Any) -> bool:
        """Whether `value` asks for nothing. True is not 1."""
        if value is None:
            return True
        return any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in self.neutral
        )


_BEAMS = "there is no beam search"
_HIDDEN = "only text, ids and logprobs are given out"
_LORA = "adapters are not loaded"
_MEDIA = "this server takes and gives text only"
_PARALLEL = "there is one replica, which does its own prefill"
_PROCESSOR = "clients cannot bring code"
_REASONING = "only /v1/messages bounds reasoning: thinking.budget_tokens"
_CHAT = "only /v1/chat/completions has tools"
_SESSION = "every request stands for itself; its prefix is cached anyway"
_STOPS = "use stop or stop_token_ids"
_TEMPLATE = "the chat template is the model's"
_TOOLS = "use tools and tool_choice"

HARMLESS = frozenset(
    {
        "annotations",
        "cache_control",
        "log_metrics",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "refusal",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

UNBUILT: dict[str, Unbuilt] = {
    # The prompt
    "add_generation_prompt": Unbuilt("an answer always begins a new message", (True,)),
    "add_special_tokens": Unbuilt("only /v1/completions and /tokenize have the choice", (False,)),
    "audio": Unbuilt(_MEDIA),
    "audio_data": Unbuilt(_MEDIA, ([],)),
    "chat_template": Unbuilt(_TEMPLATE),
    "continue_final_message": Unbuilt("the chat has it, /v1/messages does it by itself", (False,)),
    "echo": Unbuilt("only /v1/completions repeats the prompt", (False,)),
    "image_data": Unbuilt(_MEDIA, ([],)),
    "input_embeds": Unbuilt("a prompt is text or ids"),
    "input_ids": Unbuilt("only /generate and /v1/completions take ids"),
    "modalities": Unbuilt(_MEDIA, ([], ["text"])),
    "prompt_embeds": Unbuilt("a prompt is text or ids"),
    "session_params": Unbuilt(_SESSION, ({},)),
    "suffix": Unbuilt("text is not filled in before a suffix", ("",)),
    "truncate_prompt_tokens": Unbuilt("a prompt that is too long is refused"),
    "video_data": Unbuilt(_MEDIA, ([],)),
    # Tools and reasoning
    "function_call": Unbuilt(_TOOLS),
    "functions": Unbuilt(_TOOLS),
    "include_reasoning": Unbuilt("text is not parsed here", (True,)),
    "max_thinking_tokens": Unbuilt(_REASONING),
    "parallel_tool_calls": Unbuilt(_CHAT),
    "separate_reasoning": Unbuilt("text is not parsed here", (False,)),
    "thinking_token_budget": Unbuilt(_REASONING),
    "tool_choice": Unbuilt(_CHAT, ("none",)),
    "tools": Unbuilt(_CHAT, ([],)),
    "verbosity": Unbuilt("the model has no such control", ("medium",)),
    "web_search_options": Unbuilt("there is no web search"),
    # Structured output
    "allowed_token_ids": Unbuilt("use logit_bias, or a constraint"),
    "guided_choice": Unbuilt("use structured_outputs.choice"),
    "guided_decoding_backend": Unbuilt("the server chooses it: --grammar-backend"),
    "guided_grammar": Unbuilt("use structured_outputs.grammar"),
    "guided_json": Unbuilt("use structured_outputs.json"),
    "guided_regex": Unbuilt("use structured_outputs.regex"),
    "guided_whitespace_pattern": Unbuilt("use structured_outputs.whitespace_pattern"),
    "output_format": Unbuilt("use output_config.format of /v1/messages, or response_format"),
    # Sampling
    "bad_words": Unbuilt("use logit_bias", ([],)),
    "beam_width": Unbuilt(_BEAMS),
    "best_of": Unbuilt("choices are not ranked; use n", (1,)),
    "custom_logit_processor": Unbuilt(_PROCESSOR),
    "custom_params": Unbuilt(_PROCESSOR, ({},)),
    "early_stopping": Unbuilt(_BEAMS, (False,)),
    "length_penalty": Unbuilt(_BEAMS, (1,)),
    "logits_processors": Unbuilt(_PROCESSOR, ([],)),
    "lora_path": Unbuilt(_LORA),
    "prediction": Unbuilt("there is no speculative decoding"),
    "stop_regex": Unbuilt(_STOPS, ([],)),
    "use_beam_search": Unbuilt(_BEAMS, (False,)),
    # The answer
    "include_obfuscation": Unbuilt("events are not padded", (False,)),
    "prompt_logprobs": Unbuilt("only /v1/completions and /v1/chat/completions have them"),
    "return_entropy": Unbuilt(_HIDDEN, (False,)),
    "return_hidden_states": Unbuilt(_HIDDEN, (False,)),
    "return_token_ids": Unbuilt("only /generate gives ids", (False,)),
    "return_tokens_as_token_ids": Unbuilt("only /generate gives ids", (False,)),
    "spaces_between_special_tokens": Unbuilt("there is no such choice", (True, False)),
    "stream_interval": Unbuilt("events come as soon as the client reads them"),
    "token_ids_logprob": Unbuilt("use top_logprobs_num", ([],)),
    # Agents' APIs
    "container": Unbuilt("tools run at the client"),
    "context_management": Unbuilt(_SESSION),
    "conversation": Unbuilt(_SESSION),
    "max_tool_calls": Unbuilt("tools run at the client"),
    "mcp_servers": Unbuilt("tools run at the client", ([],)),
    "previous_response_id": Unbuilt(_SESSION),
    # Where and when it runs
    "background": Unbuilt("the answer comes with the call", (False,)),
    "bootstrap_host": Unbuilt(_PARALLEL),
    "bootstrap_port": Unbuilt(_PARALLEL),
    "bootstrap_room": Unbuilt(_PARALLEL),
    "data_parallel_rank": Unbuilt(_PARALLEL),
    "priority": Unbuilt("requests have no priority", (0,)),
}
