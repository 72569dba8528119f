"""Everything that two processes must agree on, and nothing else: messages, configs, errors,
sockets.

May import: msgspec and pyzmq. May be imported by: every room.
"""
