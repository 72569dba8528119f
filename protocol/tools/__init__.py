"""What the programs of the command line share with a server's processes."""
