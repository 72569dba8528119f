"""The parts of `tidegate bench`. The command itself is `tools.commands.bench`.

    config.py     the options                    datasets.py        the prompts
    answers.py    bytes -> one measured answer   client.py          HTTP, and arrival times
    load.py       sends the requests             stats.py           answers -> summary of a load
    report.py     tables                         page.py            plots and the HTML page

Only client.py and load.py do I/O; datasets.py reads the file of `--file`.
"""
