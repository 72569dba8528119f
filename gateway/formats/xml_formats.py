# ruff: noqa: RUF001  (markers are spelt as the vocabularies have them)
"""The formats of the syntax `xml_parameters`: which tags, and what around a value is markup.

Sources: the chat templates of Qwen3-Coder, MiMo, Seed-OSS, MiniMax-M2 and DeepSeek-V3.2; for the
others (dots, MiniCPM5, Muse, DeepSeek-V4 and V4.1, Step3) vLLM's published parsers.
"""

from __future__ import annotations

from typing import Any

from gateway.formats.xml_parameters import XmlParameters


def _invoke(prefix: str = "", **options: Any) -> XmlParameters:
    """`<invoke name="f"><parameter name="k">v</parameter></invoke>`, with prefixed tags."""
    return XmlParameters(
        call_open=f"<{prefix}invoke name=",
        call_close=f"</{prefix}invoke>",
        parameter_open=f"<{prefix}parameter name=",
        parameter_close=f"</{prefix}parameter>",
        quoted=True,
        **options,
    )


def _dsml(space: str, stretch: str) -> XmlParameters:
    mark = "｜DSML｜" + space
    return _invoke(
        mark,
        open=(f"<{mark}{stretch}>",),
        close=(f"</{mark}{stretch}>",),
        string_key="string",
        trim="nothing",
    )


QWEN3_XML = XmlParameters(bare=True, many=False, around="\n")

MUSE_CALLS = _invoke(
    "atem:",
    open=("<atem:function_calls>",),
    close=("</atem:function_calls>", "<|eom|>", "<|eot|>"),
    doubled_names=True,
    trim="nothing",
    bare_json=True,
)

FORMATS = {
    "qwen3_coder": QWEN3_XML,
    "qwen3_xml": QWEN3_XML,
    "step3p5": QWEN3_XML,
    "mimo": XmlParameters(bare=True, trim="nothing", many=False),
    "seed_oss": XmlParameters(
        open=("<seed:tool_call>",), close=("</seed:tool_call>",), trim="nothing", many=False
    ),
    "minimax_m2": _invoke(
        open=("<minimax:tool_call>",), close=("</minimax:tool_call>",), trim="nothing"
    ),
    "dots": _invoke(
        open=("<dots_function_call>",), close=("</dots_function_call>",), trim="blanks"
    ),
    "minicpm5": XmlParameters(
        open=(),
        close=(),
        call_open="<function name=",
        call_close="</function>",
        parameter_open="<param name=",
        parameter_close="</param>",
        quoted=True,
        trim="blanks",
        bare_json=True,
        line="",
    ),
    "deepseek_v32": _dsml("", "function_calls"),
    "deepseek_v4": _dsml("", "tool_calls"),
    "deepseek_v41": _dsml(" ", "calls"),
    "step3": _invoke(
        "steptml:",
        open=("<｜tool_calls_begin｜>",),
        close=("<｜tool_calls_end｜>",),
        skip=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
        trim="nothing",
        call_before="<｜tool_call_begin｜>function<｜tool_sep｜>",
        call_after="<｜tool_call_end｜>",
    ),
}
