"""Messages and facts that commands of `tidegate` exchange with the processes of a server."""
