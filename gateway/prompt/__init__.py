"""Messages to prompt text. Pure: takes values parsed from JSON, returns text or token ids."""
