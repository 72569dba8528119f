"""Processes with hard limits of time and memory, which run code of models and requests.

clients.py   chat templates and tokenizers, as the gateway uses them
process.py   one sandbox process, as the gateway sees it: started, called, killed, replaced
messages.py  its calls and replies
__main__.py  the process itself
"""
