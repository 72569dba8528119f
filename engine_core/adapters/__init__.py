"""LoRA adapters: which are loaded, who uses them, and which to load again after a restart."""
