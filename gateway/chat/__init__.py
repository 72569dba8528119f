"""Messages -> prompt. Pure: takes values parsed from JSON, returns text or token ids."""
