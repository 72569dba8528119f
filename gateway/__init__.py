"""Text and HTTP: what people send becomes token ids, what the engine sends becomes text and events.

May import: itself, `protocol`, and msgspec, zmq, gevent, flask, jinja2, tokenizers,
prometheus_client, gunicorn. Never torch or transformers: a gateway needs no model files and starts
in a fifth of a second. Three inner rooms know neither HTTP nor sockets and take plain values:
`text` (ids <-> text), `chat` (messages -> prompt) and `output` (what the text means).
"""
