"""The worker: loads the model, holds its weights and the K/V cache, and computes the engine's
steps.

It schedules nothing. It imports `protocol`, msgspec, pyzmq, numpy, torch, safetensors and gguf, and
transformers only for models that run in that library. No other package imports the worker,
because it runs in a process of its own.
"""
