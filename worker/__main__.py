"""`python -P -m worker --config JSON`"""

import os
import sys

# Read by the OpenMP runtime when torch is loaded: threads that wait sleep instead of spinning. Two
# that spin on cores which other processes need made a step ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from worker.process import main

sys.exit(main())
