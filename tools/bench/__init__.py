"""The parts of `tidegate bench`. The command itself is `tools.commands.bench`.

    config.py     the options                    datasets.py   the prompts
    client.py     HTTP, and arrival times        answers.py    parses one answer and measures it
    load.py       sends the requests             stats.py      summarises the answers of a load
    report.py     tables                         page.py       plots and the HTML page

Only client.py and load.py use the network. datasets.py reads the file given by `--file`.
"""
