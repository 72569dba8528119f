"""Everything that uses Flask, gunicorn or sockets."""
