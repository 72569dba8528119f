"""Who is let in, and to what: keys, hosts, targets, scopes.

Knows no Flask: `app.py` asks a `Gate`.
"""
