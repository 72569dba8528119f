"""Computation: model files, weights, the KV cache, one step after another. Decides nothing.

May import: protocol, numpy, torch, safetensors, gguf. May be imported by: nobody; it is a process.
"""
