"""Damages files of models, and checks that each damaged model is loaded, or refused in one line."""
