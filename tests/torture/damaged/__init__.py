"""Damages the files of models, and checks that each is read or refused in one line."""
