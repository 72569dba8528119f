"""Writes a model in safetensors files as a quantised GGUF file (`tidegate quantize`)."""
