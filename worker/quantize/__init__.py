"""Writes a model of safetensors as a quantised GGUF file (`tidegate quantize`)."""
