"""Everything that two Tidegate processes must agree on: messages, configs, errors and sockets.

This package imports only msgspec, pyzmq and the standard library. Every other package may import
it. So it also has the class of all state tables (`machine.py`), although they cross no process
boundary.
"""
