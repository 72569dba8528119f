"""Options of other servers and their replacements here, for error messages.

They are not accepted as aliases. The command still fails, and its error names the replacement.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

_MODEL = "the model is the first argument: tidegate serve MODEL"
_ONE_DEVICE = "a model runs on one device here; to use several devices, start a server for each"
_SHARE = "--kv-memory-gib sets the size of the KV cache, in GiB"
_DRAFTS = "--speculation selects the method; see also --draft-model and --max-drafts"
_ALWAYS_CHUNKED = "prompts are always computed in chunks; --token-budget limits the tokens per step"
_PREFIX_CACHE_ON = "the prefix cache is on by default; --no-prefix-cache disables it"
_TLS = "TLS is not built in; use a reverse proxy"
_METRICS_ON = "/metrics is always served"
_KERNELS = "--kernels selects the kernels on a CPU"
_NO_LORA = "LoRA adapters are not supported; merge them into the model first"
_REQUESTS = "--default-sampling sets sampling parameters for requests that set none"
_FETCHED = "$TIDEGATE_HOME selects the directory of downloaded models"

VLLM: Mapping[str, str] = {
    "--model": _MODEL,
    "--max-model-len": "--max-len",
    "--max-num-seqs": "--max-slots",
    "--max-num-batched-tokens": "--token-budget",
    "--gpu-memory-utilization": _SHARE,
    "--kv-cache-memory-bytes": _SHARE,
    "--num-gpu-blocks-override": "--kv-blocks",
    "--block-size": "--block-tokens",
    "--swap-space": "--kv-host-gib",
    "--kv-offloading-size": "--kv-host-gib",
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "-dp": _ONE_DEVICE,
    "--served-model-name": "--served-name",
    "--enable-prefix-caching": _PREFIX_CACHE_ON,
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--enable-chunked-prefill": _ALWAYS_CHUNKED,
    "--enforce-eager": "no graphs are compiled or captured, so there is nothing to disable",
    "--trust-remote-code": "code that comes with a model is never run",
    "--tokenizer": "a model is served with its own tokenizer",
    "--quantization": "weights keep the types of the file; --weights selects their form in memory",
    "--load-format": "GGUF and safetensors files are recognised automatically",
    "--download-dir": _FETCHED,
    "--enable-auto-tool-choice": "tool calls are always parsed; --tool-format selects the format",
    "--tool-call-parser": "--tool-format",
    "--reasoning-parser": "--reasoning-format",
    "--enable-reasoning": "reasoning is always parsed; --reasoning-format selects the format",
    "--speculative-config": _DRAFTS,
    "--speculative-model": _DRAFTS,
    "--num-speculative-tokens": "--max-drafts",
    "--generation-config": _REQUESTS,
    "--override-generation-config": "--default-sampling",
    "--disable-log-requests": "--no-log-requests",
    "--enable-log-requests": "requests are logged by default; --no-log-requests disables it",
    "--allowed-origins": "--cors-origin",
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--api-server-count": "--gateways",
    "--kv-transfer-config": "--split, or --prefill and --decode",
    "--enable-lora": _NO_LORA,
    "--lora-modules": _NO_LORA,
    "--seed": "set `seed` in each request",
}
SGLANG: Mapping[str, str] = {
    "--model-path": _MODEL,
    "--context-length": "--max-len",
    "--max-running-requests": "--max-slots",
    "--max-queued-requests": "--max-waiting",
    "--max-total-tokens": "--kv-blocks",
    "--mem-fraction-static": _SHARE,
    "--chunked-prefill-size": "--token-budget",
    "--max-prefill-tokens": "--token-budget",
    "--page-size": "--block-tokens",
    "--disable-radix-cache": "--no-prefix-cache",
    "--hicache-size": "--kv-host-gib",
    "--tp-size": _ONE_DEVICE,
    "--tp": _ONE_DEVICE,
    "--dp-size": _ONE_DEVICE,
    "--dp": _ONE_DEVICE,
    "--speculative-algorithm": "--speculation",
    "--speculative-draft-model-path": "--draft-model",
    "--speculative-num-draft-tokens": "--max-drafts",
    "--preferred-sampling-params": "--default-sampling",
    "--attention-backend": _KERNELS,
    "--disaggregation-mode": "--split here, or `tidegate engine --role` on several hosts",
    "--log-requests": "requests are logged by default; --no-log-requests disables it",
    "--enable-metrics": _METRICS_ON,
    "--watchdog-timeout": "--step-timeout-s",
}
LLAMA_CPP: Mapping[str, str] = {
    "-m": _MODEL,
    "-c": "--max-len",
    "--ctx-size": "--max-len",
    "-np": "--max-slots",
    "--parallel": "--max-slots",
    "-t": "--threads",
    "-b": "--token-budget",
    "--batch-size": "--token-budget",
    "-ub": "--token-budget",
    "--ubatch-size": "--token-budget",
    "-ngl": "--device",
    "--gpu-layers": "--device",
    "--n-gpu-layers": "--device",
    "-fa": _KERNELS,
    "--flash-attn": _KERNELS,
    "-a": "--served-name",
    "--alias": "--served-name",
    "--api-key-file": "--api-keys",
    "--jinja": "the model's chat template is always used",
    "--chat-template-file": "--chat-template",
    "--chat-template-kwargs": "--default-chat-template-kwargs",
    "-md": "--draft-model",
    "--model-draft": "--draft-model",
    "--draft": "--max-drafts",
    "--draft-max": "--max-drafts",
    "--cache-ram": "--kv-host-gib",
    "--slot-save-path": "--kv-disk",
    "--metrics": _METRICS_ON,
    "--temp": _REQUESTS,
    "--temperature": _REQUESTS,
    "--top-p": _REQUESTS,
    "--top-k": _REQUESTS,
    "--min-p": _REQUESTS,
    "--timeout": "--timeout-s",
    "--threads-http": "--gateways",
    "--lora": _NO_LORA,
}
OPTIONS: Mapping[str, str] = {**LLAMA_CPP, **SGLANG, **VLLM}


def advice(word: str, known: Collection[str], others: Mapping[str, str]) -> str:
    """Return the replacement for the unknown option `word`, or "" if no option is similar.

    others   options of other servers -> their replacement
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
