"""Access control: API keys, scopes, and checks of request heads."""
