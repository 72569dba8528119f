"""Connections to engines, and what a gateway remembers of them."""
