"""Computation: model files, weights, the K/V cache, one step after another. Schedules nothing.

May import: protocol, numpy, torch, safetensors, gguf. Nothing imports this package: it runs as a
process of its own.
"""
