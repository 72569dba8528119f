"""Runs the tests behind vllm-router and nginx, with more load than `make test`.

    python -m tests.torture.fronts [-k killed]

vllm-router is installed, once, into a virtual environment of its own inside the main one. nginx is
used if it is installed. Arguments go to pytest. The command exits with pytest's exit code. `make
torture` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv

from tests.stages import PYTEST
from tests.support.examples import MORE, VARIABLE
from tests.support.fronts import ROUTER_ENVIRONMENT, ROUTER_VERSION

TESTS = ("tests/integration/test_fronts.py", "tests/e2e/test_router.py")


def install_router() -> None:
    """Install vllm-router, unless it is installed. Raises CalledProcessError."""
    if (ROUTER_ENVIRONMENT / "bin" / "vllm-router").exists():
        return
    pin = f"vllm-router=={ROUTER_VERSION}"
    print(f"== Installing {pin} into {ROUTER_ENVIRONMENT}; once", flush=True)
    venv.create(ROUTER_ENVIRONMENT, symlinks=True)
    python = str(ROUTER_ENVIRONMENT / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, pin], check=True)


def main(arguments: list[str]) -> int:
    install_router()
    environment = {**os.environ, VARIABLE: MORE}
    return subprocess.run([*PYTEST, "-v", *TESTS, *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
