"""Formats of model output: how models write reasoning and tool calls. A format's parser turns
generated text into events, and its grammar constrains generation to the same syntax.
"""
