"""Fuzzing: sends slightly changed messages to every socket, and changed bodies to every route.

    values   change a value inside a message or a JSON body
    frames   change the structure or the bytes of a message
    sockets  the ZeroMQ sockets of real processes: see decisions, workers and strangers
    bodies   the POST routes of a real gateway

`python -m tests.torture.fuzz --frames 1000000 --bodies 100000` runs all targets and prints a table.
All changes follow from a seed, so a failure can be repeated.
"""
