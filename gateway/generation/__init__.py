"""The choices of one HTTP request, whatever its API: from prompt to events."""
