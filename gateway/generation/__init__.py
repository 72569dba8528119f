"""Generates the choices of one HTTP request, for every API: from prompts to events."""
