"""Model names: the catalogue, downloads, and the check before a start."""
