"""Code that comes with a model or a request, run in processes with hard limits of time and memory.

templates.py  chat templates, loaded and rendered in such processes
process.py    one such process, as the gateway sees it: started, called, killed, replaced
calls.py      what the two say to each other
__main__.py   the process itself
"""
