"""Text and HTTP: requests become token ids, and the engine's tokens become text and events.

The gateway may import itself, `protocol`, and the libraries msgspec, zmq, gevent, flask, jinja2,
tokenizers, prometheus_client, gunicorn and opentelemetry. It never imports torch or transformers,
so it needs no model files and starts in a fifth of a second. Three folders use neither HTTP nor
sockets and convert plain values: `prompt` (messages to prompt text), `text` (text to token ids and
back) and `formats` (text to content, reasoning and tool calls).
"""
