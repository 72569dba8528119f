"""The entrance of the simulator: `python -m simulator --config JSON`.

It writes one JSON object per line to stdout (protocol/tools/simulation.py).
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from protocol.tools.simulation import SimulationConfig, SimulationFailed, SimulatorLine
from simulator.hardware import describe_table
from simulator.machine import replica_type
from simulator.run import Simulation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--config", help="a SimulationConfig, as JSON")
    choice.add_argument("--list", action="store_true", help="print the tables, as text")
    options = parser.parse_args()
    if options.list:
        print(describe_table())
        return 0
    config = msgspec.json.decode(options.config, type=SimulationConfig)
    try:
        kind = replica_type(config)
        simulation = Simulation(config, kind)
    except (OSError, ValueError) as error:
        _write(SimulationFailed(message=str(error)))
        return 1
    _write(kind.facts())
    for result in simulation.results():
        _write(result)
    return 0


def _write(line: SimulatorLine) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
