"""Compares Tidegate, vLLM and llama.cpp under the same loads, in turn, on one machine.

python -m tests.benchmarks.peers --help

plan.py      the loads and the order of the servers, without I/O
servers.py   how each server is started and stopped
measure.py   one server's turn
report.py    tables, ratios and a picture, from figures in a JSON file
"""
