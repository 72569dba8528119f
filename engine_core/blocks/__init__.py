"""K/V blocks: the pool, content hashes and the prefix cache."""
