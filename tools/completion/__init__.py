"""Completion in shells: scripts for bash, zsh and fish, generated from the command line's parser.

    tree.py     the commands, options and arguments, as the scripts need them
    bash.py, zsh.py, fish.py   one script each
    values.py   names that only this machine knows: models, ports of servers, API keys

A script contains all commands and options, so completing these starts no process. argparse's tree
suffices for that: shtab, the usual library, has no fish and would be one more dependency.
"""
