"""Quantises a GGUF file with llama.cpp. Its environment needs only llama-cpp-python.

stdin: {"model": path, "output": path, "file_type": number of llama_ftype} as JSON. Every matrix
whose rows fit the blocks of this type gets it: llama.cpp's usual mix of types is switched off. The
exit code is 1 if llama.cpp refuses the file.
"""

from __future__ import annotations

import json
import sys

import llama_cpp  # type: ignore[import-not-found]


def main() -> int:
    asked = json.load(sys.stdin)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = asked["file_type"]
    options.pure = True
    options.allow_requantize = True
    paths = [asked[name].encode() for name in ("model", "output")]
    return 1 if llama_cpp.llama_model_quantize(*paths, options) else 0


if __name__ == "__main__":
    sys.exit(main())
