"""Processes with hard limits on time and memory. They run chat templates and tokenizers, which come
with a model or a request and so are not trusted.

clients.py   runs chat templates and tokenizers in such processes
process.py   starts, calls, kills and replaces processes
messages.py  the calls to a process, and its replies
__main__.py  the program of the process
"""
