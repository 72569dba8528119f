"""How queries read the paged KV cache. One interface, one obvious twin, and the fast ways."""
