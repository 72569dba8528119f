"""`tidegate top`: what an engine does, as a picture that moves.

rates     what changed between two views, per second; pure
picture   views as lines of text; pure
screen    the terminal: its size, its keys, its colours
command   the command line, and the loop around the three
"""
