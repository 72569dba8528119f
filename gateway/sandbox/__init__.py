"""Processes with hard limits of time and memory. They run code that models and requests contain.

clients.py   runs chat templates and tokenizers in such processes
process.py   starts, calls, kills and replaces one process
messages.py  the calls to a process, and its replies
__main__.py  the program of the process
"""
