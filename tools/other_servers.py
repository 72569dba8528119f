"""Options and commands of vLLM, SGLang, llama.cpp and Ollama, and their replacements in Tidegate,
for error messages.

A line with such an option or command fails, and its error names the replacement. They are not
accepted as aliases.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches

REPLACEMENTS: Mapping[str, str] = {
    # an option with the same meaning
    "--api-keys": "--api-key-file",
    "--block-tokens": "--block-size --page-size",
    "--chat-template": "--chat-template-file",
    "--cors-origin": "--allowed-origins --cors-origins",
    "--default-chat-template-kwargs": "--chat-template-kwargs",
    "--default-sampling": "--override-generation-config --preferred-sampling-params",
    "--device": "-ngl --gpu-layers --n-gpu-layers",
    "--draft-model": "--speculative-draft-model-path -md --model-draft",
    "--drain-s": "--shutdown-timeout",
    "--gateways": "--api-server-count --threads-http",
    "--idle-unload-s": "--sleep-idle-seconds",
    "--keep-alive-s": "--sse-keep-alive-interval --sse-ping-interval",
    "--kv-events": "--kv-events-config",
    "--kv-blocks": "--num-gpu-blocks-override --max-total-tokens",
    "--kv-disk": "--slot-save-path",
    "--kv-dtype": "--kv-cache-dtype -ctk --cache-type-k -ctv --cache-type-v",
    "--kv-host-gib": "--swap-space --kv-offloading-size --hicache-size --cache-ram",
    "--max-drafts": "--num-speculative-tokens --speculative-num-draft-tokens --draft --draft-max",
    "--max-loaded": "--models-max",
    "--max-len": "--max-model-len --context-length -c --ctx-size",
    "--max-slots": "--max-num-seqs --max-running-requests -np --parallel",
    "--max-waiting": "--max-queued-requests --max-num-queued-reqs",
    "--max-waiting-tokens": "--max-num-queued-tokens",
    "--mmproj": "-mm",
    "--no-log-requests": "--disable-log-requests",
    "--no-prefix-cache": "--no-enable-prefix-caching --disable-radix-cache --no-cache-prompt",
    "--no-web": "--no-webui",
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
    " --temp --temperature --top-p --top-k --min-p --repeat-penalty",
    "--attention selects the attention on a GPU, and --kernels the kernels on a CPU": ""
    "--attention-backend -fa --flash-attn",
    "--gpu-memory sets the share of a GPU's memory to use": "--gpu-memory-utilization"
    " --mem-fraction-static",
    "--kv-memory-gib sets the size of the KV cache, in GiB": "--kv-cache-memory-bytes",
    "--log-format json writes one JSON object in each line": "--log-jsonl",
    "--mmproj none serves the text part alone": "--no-mmproj",
    "--models FILE names several models, in TOML": "--models-dir --models-preset",
    "`priority` of a request always works; --priority-s limits its effect": "--scheduling-policy",
    "--speculation selects the method; see also --draft-model and --max-drafts": ""
    "--speculative-config --speculative-model --spec-draft-hf",
    "--split here, or `tidegate engine --role` on several hosts": "--disaggregation-mode",
    "--split, or --prefill and --decode": "--kv-transfer-config",
    "/metrics and /slots are always served": "--enable-metrics --metrics --slots",
    "GGUF and safetensors files are recognised automatically": "--load-format",
    "--lora NAME=PATH loads a LoRA adapter; --lora-dir allows loading while the server runs": ""
    "--enable-lora --lora-modules",
    "TLS, prefixes of paths and Unix sockets are not built in; use a reverse proxy": ""
    "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file --api-prefix --uds",
    "a model is served with its own tokenizer": "--tokenizer",
    "to use several devices, divide the model among them with --tensor-parallel, or start a server "
    "for each": "-pp --pipeline-parallel-size -dp --dp --data-parallel-size --dp-size"
    " --enable-expert-parallel -sm --split-mode -ts --tensor-split -mg --main-gpu",
    "--threads is one number for all work": "-tb --threads-batch",
    "there is no counterpart": "--control-vector --rpc --numa",
    "a model is on the GPU or on the CPU as a whole; there is no counterpart": "--n-cpu-moe"
    " --cpu-moe --override-tensor",
    "a text that exceeds the context is refused; there is no counterpart": ""
    "--cache-reuse --context-shift",
    "code that comes with a model is never run": "--trust-remote-code",
    "embedding models and rerankers are recognised; --pooling makes vectors with another model": ""
    "--embedding --embeddings --rerank --reranking --task --runner",
    "$HF_HUB_OFFLINE=1 allows no download; a model in the cache needs no network anyway": ""
    "--offline",
    "$HF_TOKEN is the token": "-hft --hf-token",
    "it is always on": "--enable-sleep-mode --enable-scale-out --tokens-only -cb --cont-batching",
    "no graphs are compiled or captured, so there is nothing to disable": "--enforce-eager",
    "prompts are always computed in chunks; --token-budget limits the tokens per step": ""
    "--enable-chunked-prefill",
    "reasoning is always parsed; --reasoning-format selects the format": "--enable-reasoning",
    "requests are logged by default; --no-log-requests disables it": "--enable-log-requests",
    "set `grammar` or `json_schema` in each request": "--grammar --json-schema",
    "set `max_tokens` in each request": "-n --predict --n-predict",
    "set `samplers` in each request": "--samplers",
    "set `seed` in each request": "--seed",
    "set `thinking_token_budget` in each request": "--reasoning-budget",
    "the file of the model decides; there is no counterpart": "--rope-scaling --rope-freq-base"
    " --override-kv --mm-processor-kwargs",
    "the image encoder is computed on the CPU": "--mmproj-offload --no-mmproj-offload",
    "the limits of images are fixed": "--limit-mm-per-prompt",
    "the model is the first argument: tidegate serve MODEL": "--model --model-path -m",
    "the model is the first argument, with the same name: tidegate serve OWNER/REPO:Q4_K_M": ""
    "-hf -hfr --hf-repo",
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

BATCH_OPTIONS: Mapping[str, str] = dict.fromkeys(
    ("-i", "--input-file", "-o", "--output-file"),
    "the files are arguments: tidegate run-batch INPUT OUTPUT",
)
"""The same for `run-batch`, which vLLM has too."""

COMMANDS: Mapping[str, str] = {
    "collect-env": "use tidegate doctor",
    "complete": "use tidegate run MODEL PROMPT --raw",
    "cp": "to serve a model by another name: tidegate serve NAME=MODEL",
    "create": "tidegate serve --models FILE reads what a Modelfile has, from TOML",
    "download": "use tidegate pull MODEL",
    "help": "use tidegate --help, or tidegate COMMAND --help",
    "list": "use tidegate models",
    "ls": "use tidegate models",
    "push": "nothing is published",
    "show": "use tidegate doctor MODEL",
    "signin": "there are no accounts; $HF_TOKEN is the token for private models of the Hub",
    "start": "use tidegate serve MODEL",
    "version": "use tidegate --version",
}
"""A command of another server, or one that people guess -> its replacement."""


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


def advice_on_field(key: str, names: Mapping[str, str]) -> str:
    """Return the advice about the unknown option `key` of a file or a script, where an option is
    named by its field; "" if there is none.

    names   our option -> its field
    """
    hint = advice(f"--{key.replace('_', '-')}", names, OPTIONS)
    for option in sorted({*re.findall(r"--[a-z][a-z-]*", hint)}, key=len, reverse=True):
        hint = hint.replace(option, names.get(option, option[2:].replace("-", "_")))
    return hint
