"""The bytes between processes: sockets, the codec of messages, arrays, and errors."""
