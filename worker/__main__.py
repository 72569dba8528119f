"""`python -P -m worker --config JSON`"""

import os
import sys

# Read by the OpenMP runtime when torch is loaded: threads that wait sleep instead of spinning, or an
# idle server would keep its cores busy and starve the processes that feed it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from worker.process import main

sys.exit(main())
