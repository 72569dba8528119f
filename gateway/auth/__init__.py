"""Who may call which route: keys, scopes, hosts and request targets."""
