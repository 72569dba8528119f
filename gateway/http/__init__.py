"""All that knows Flask, gunicorn or a socket."""
