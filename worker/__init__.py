"""The worker: loads the model, holds its weights and the K/V cache, and computes the engine's
steps.

It schedules nothing. It imports `protocol`, msgspec, pyzmq, numpy, torch, safetensors and gguf. No
other package imports it, because it runs as a process of its own.
"""
