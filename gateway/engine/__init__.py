"""The connection to one engine, and what every engine client has in common."""
