"""Requests that encode: their steps, and their results until the client has room for them."""
