"""Options of vLLM, SGLang and llama.cpp, and their replacements in Tidegate, for error messages.

A command with such an option fails, and its error names the replacement. The options are not
accepted as aliases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

REPLACEMENTS: Mapping[str, str] = {
    # an option with the same meaning
    "--api-keys": "--api-key-file",
    "--block-tokens": "--block-size --page-size",
    "--chat-template": "--chat-template-file",
    "--cors-origin": "--allowed-origins",
    "--default-chat-template-kwargs": "--chat-template-kwargs",
    "--default-sampling": "--override-generation-config --preferred-sampling-params",
    "--device": "-ngl --gpu-layers --n-gpu-layers",
    "--draft-model": "--speculative-draft-model-path -md --model-draft",
    "--gateways": "--api-server-count --threads-http",
    "--kv-blocks": "--num-gpu-blocks-override --max-total-tokens",
    "--kv-disk": "--slot-save-path",
    "--kv-dtype": "--kv-cache-dtype -ctk --cache-type-k -ctv --cache-type-v",
    "--kv-host-gib": "--swap-space --kv-offloading-size --hicache-size --cache-ram",
    "--max-drafts": "--num-speculative-tokens --speculative-num-draft-tokens --draft --draft-max",
    "--max-len": "--max-model-len --context-length -c --ctx-size",
    "--max-slots": "--max-num-seqs --max-running-requests -np --parallel",
    "--max-waiting": "--max-queued-requests",
    "--no-log-requests": "--disable-log-requests",
    "--no-prefix-cache": "--no-enable-prefix-caching --disable-radix-cache",
    "--reasoning-format": "--reasoning-parser",
    "--served-name": "--served-model-name -a --alias",
    "--speculation": "--speculative-algorithm",
    "--step-timeout-s": "--watchdog-timeout",
    "--tensor-parallel": "-tp --tensor-parallel-size --tp-size",
    "--threads": "-t",
    "--timeout-s": "--timeout",
    "--token-budget": "--max-num-batched-tokens --chunked-prefill-size --max-prefill-tokens"
    " -b --batch-size -ub --ubatch-size",
    "--tool-format": "--tool-call-parser",
    # another way to achieve the same, or an explanation why there is none
    "$TIDEGATE_HOME selects the directory of downloaded models": "--download-dir",
    "--default-sampling sets sampling parameters for requests that set none": "--generation-config"
    " --temp --temperature --top-p --top-k --min-p",
    "--attention selects the attention on a GPU, and --kernels the kernels on a CPU": ""
    "--attention-backend -fa --flash-attn",
    "--gpu-memory sets the share of a GPU's memory to use": "--gpu-memory-utilization"
    " --mem-fraction-static",
    "--kv-memory-gib sets the size of the KV cache, in GiB": "--kv-cache-memory-bytes",
    "--speculation selects the method; see also --draft-model and --max-drafts": ""
    "--speculative-config --speculative-model",
    "--split here, or `tidegate engine --role` on several hosts": "--disaggregation-mode",
    "--split, or --prefill and --decode": "--kv-transfer-config",
    "/metrics is always served": "--enable-metrics --metrics",
    "GGUF and safetensors files are recognised automatically": "--load-format",
    "--lora NAME=PATH loads a LoRA adapter; --lora-dir allows loading while the server runs": ""
    "--enable-lora --lora-modules",
    "TLS is not built in; use a reverse proxy": "--ssl-keyfile --ssl-certfile",
    "a model is served with its own tokenizer": "--tokenizer",
    "to use several devices, divide the model among them with --tensor-parallel, or start a server "
    "for each": "-pp --pipeline-parallel-size -dp --dp --data-parallel-size --dp-size",
    "code that comes with a model is never run": "--trust-remote-code",
    "no graphs are compiled or captured, so there is nothing to disable": "--enforce-eager",
    "prompts are always computed in chunks; --token-budget limits the tokens per step": ""
    "--enable-chunked-prefill",
    "reasoning is always parsed; --reasoning-format selects the format": "--enable-reasoning",
    "requests are logged by default; --no-log-requests disables it": "--enable-log-requests",
    "set `seed` in each request": "--seed",
    "the model is the first argument: tidegate serve MODEL": "--model --model-path -m",
    "the model's chat template is always used": "--jinja",
    "the prefix cache is on by default; --no-prefix-cache disables it": "--enable-prefix-caching",
    "tool calls are always parsed; --tool-format selects the format": "--enable-auto-tool-choice",
    "weights keep the types of the file; --weights selects their form in memory": "--quantization",
}
"""Replacement -> the options of other servers that it replaces, separated by spaces."""

OPTIONS: Mapping[str, str] = {
    option: replacement
    for replacement, options in REPLACEMENTS.items()
    for option in options.split()
}
"""Option of another server -> its replacement."""


def advice(word: str, known: Collection[str], others: Mapping[str, str]) -> str:
    """Return advice about the unknown option `word`: its replacement, or a similar option; "" if
    none.

    known    our options
    others   option of another server -> its replacement
    """
    name = word.partition("=")[0]
    dashed = "-" * (len(name) - len(name.lstrip("-"))) + name.lstrip("-").replace("_", "-")
    if dashed in known:
        return f"did you mean {dashed}?"
    if dashed in others:
        instead = others[dashed]
        return f"use {instead}" if instead in known else instead
    close = get_close_matches(dashed, sorted(known), n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else ""
