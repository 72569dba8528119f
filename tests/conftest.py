"""What holds for every test: nothing goes online by itself, and nobody takes all the cores.

Set before any library is imported, since they read these once.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))

# Time on a shared machine says nothing about an example. In CI the examples are always the same, so
# that a failure is the change's own; elsewhere they are new each time.
settings.register_profile("tidegate", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tidegate")
