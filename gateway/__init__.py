"""Text and HTTP: requests become token ids, and the engine's tokens become text and events.

May import: itself, `protocol`, and msgspec, zmq, gevent, flask, jinja2, tokenizers,
prometheus_client, gunicorn. Never torch or transformers: a gateway needs no model files and starts
in a fifth of a second. Three folders use neither HTTP nor sockets and take plain values: `prompt`
(messages to prompt text), `text` (token ids to text and back) and `formats` (what the text means).
"""
