"""LoRA adapters: which are loaded, which requests use them, and which to load after a restart."""
