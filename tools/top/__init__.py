"""The parts of `tidegate top`. The command itself is `tools.commands.top`.

picture   renders views, and the rates between them, as lines of text; pure
screen    the terminal: size, keys, alternate screen
"""
