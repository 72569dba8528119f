"""The meaning of generated text: parsers from token ids to events, and grammars of the same
syntaxes.
"""
