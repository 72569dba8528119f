"""Formats of model output. A format's parser turns generated text into events, and its grammar
constrains generation to the same syntax.
"""
