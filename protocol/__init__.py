"""The words: everything two processes must agree on, and nothing else.

May import: msgspec and pyzmq. May be imported by: every room.
"""
