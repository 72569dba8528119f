"""Starting, watching and finding the processes of a server."""
