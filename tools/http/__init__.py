"""The HTTP client of the commands, and a parser of server-sent events."""
