"""Token ids and text. Pure: no sockets, no HTTP; threads only through a function that is passed
in.
"""
