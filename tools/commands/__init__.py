"""The commands of `tidegate`, one file each."""
