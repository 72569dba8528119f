"""The worker: loads the model, holds its weights and the K/V cache, and computes the engine's
steps.

It schedules nothing. May import: protocol, numpy, torch, safetensors, gguf. Nothing imports this
package, because it runs as a process of its own.
"""
