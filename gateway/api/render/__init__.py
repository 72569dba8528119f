"""Renders requests into token ids and derenders generated token ids into API responses."""
