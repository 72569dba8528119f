"""Response templates of the kind in checkpoints, based on transformers' documentation and tests."""

from __future__ import annotations

from typing import Any

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

SMOLLM = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}

QWEN3 = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": FUNCTION,
        },
        "content": {"content": "text"},
    },
}

GPT_OSS = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": (
                r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>"
            ),
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
    },
}

COHERE = {
    "start_anchor": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "fields": {
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {
                "type": "function",
                "function": {"name": "{tool_name}", "arguments": "{parameters}"},
            },
        },
    },
}

ERNIE = {
    "start_anchor": "Assistant:",
    "fields": {
        "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
        "content": {"open": "<response>\n", "close_pattern": r"\n?</response>"},
        "tool_calls": SMOLLM["fields"]["tool_calls"],  # type: ignore[index]
    },
}

GEMMA4 = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": FUNCTION,
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
    },
}

MUSE = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {"open_pattern": r"to=self<\|message\|>", "close": "<|eom|>"},
        "content": {"open_pattern": r"to=user<\|message\|>", "close": ["<|eot|>", "<|eom|>"]},
        "tool_calls": {
            "open_pattern": r'<atem:invoke\b[^>]*?\bname="(?P<name>[^"]+)">',
            "close": "</atem:invoke>",
            "content": "xml-inline",
            "repeats": True,
            "content_args": {
                "tag_pattern": (
                    r'<atem:parameter\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*?>(?P<value>.*?)'
                    r"</atem:parameter>"
                ),
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": FUNCTION,
        },
    },
}

LLAMA = {
    "start_anchor": "<|begin_of_text|>",
    "fields": {
        "thinking": {
            "open": "<|start_header_id|>thinking<|end_header_id|>\n\n",
            "close": "<|eot_id|>",
        },
        "content": {
            "open": "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "close": "<|eot_id|>",
        },
        "tool_calls": {
            "open_pattern": r"<\|start_header_id\|>call:(?P<name>\w+)<\|end_header_id\|>",
            "close": "<|eot_id|>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
    },
}
"""An invented template. Its headers consist of special tokens of Llama 3."""

TEMPLATES: dict[str, dict[str, Any]] = {
    "smollm": SMOLLM,
    "qwen3": QWEN3,
    "gpt_oss": GPT_OSS,
    "cohere": COHERE,
    "ernie": ERNIE,
    "gemma4": GEMMA4,
    "muse": MUSE,
}
