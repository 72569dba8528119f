"""Slots: per-request buffers that are kept between steps."""
