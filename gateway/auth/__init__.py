"""Access control: API keys, scopes, hosts and request targets."""
