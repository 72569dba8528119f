"""Puts a model together: reads its headers, decides what is held in which form, and loads it."""
