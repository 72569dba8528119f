"""`tidegate bench`: the load that clients make, and how long they wait.

    config.py     what is asked for              datasets.py   the prompts
    answers.py    bytes -> one measured answer   client.py     sockets, and when bytes came
    load.py       when requests are sent         stats.py      answers -> one summary a load
    report.py     tables                         plot.py, page.py   pictures
    command.py    `tidegate bench`               bench_step.py       `tidegate bench step`

Only client.py, load.py, command.py and bench_step.py do I/O.
"""
