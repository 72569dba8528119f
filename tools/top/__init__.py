"""The parts of `tidegate top`. The command itself is `tools.commands.top`.

picture   draws the state of an engine as lines of text, without I/O
screen    the terminal: size, keys, alternate screen
"""
