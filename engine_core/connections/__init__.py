"""The clients: their socket, who is connected and reads, and the subscribers of KV events."""
