"""The parts of `tidegate top`. The command itself is `tools.commands.top`.

rates     rates per second between two views; pure
picture   renders views as lines of text; pure
screen    the terminal: size, keys, alternate screen
"""
