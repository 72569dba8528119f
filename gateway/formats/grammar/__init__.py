"""Tool syntaxes, turned round: the description that a machine reads by, as a grammar to write by.

One file per syntax, and their table in `writers`. `calls` says where the calls may stand.
"""
