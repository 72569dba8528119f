"""The client libraries. Their public names are protocol.client, async_client and offline."""
