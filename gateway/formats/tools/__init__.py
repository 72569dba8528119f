"""One file per syntax of tool calls. Each exports its machine, its description and `FORMATS`: the
names that use it."""
