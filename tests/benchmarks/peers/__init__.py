"""Tidegate, vLLM and llama.cpp under the same loads, in turn, on one machine.

python -m tests.benchmarks.peers --help

plan.py      which loads, and in which order servers have their turns: no I/O
servers.py   how each is started and stopped
measure.py   one server's turn
report.py      what came of it: tables, ratios, a picture, from figures that are a JSON file
"""
