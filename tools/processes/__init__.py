"""Starts, watches and finds the processes of a server."""
