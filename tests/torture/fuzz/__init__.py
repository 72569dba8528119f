"""Nonsense, made from sense: whatever a socket or a route can be sent, near to what it understands.

    values   one value, changed somewhere: of a message, or of a JSON body
    frames   messages of each direction, changed in their structure or in their bytes
    sockets  each ZeroMQ socket of real processes: decisions, workers, strangers
    bodies   each POST route of a real gateway, and what must be true of it afterwards

`python -m tests.torture.fuzz --frames 1000000 --bodies 100000` does all of it and prints a table.
Everything follows from a seed, so whatever is found can be found again.
"""
