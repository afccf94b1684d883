"""hpcllm: training code for large language models that is native to MPI."""

import time

__version__ = "0.1.0"
STARTED_S = time.monotonic()  # of the process, nearly: the imports that take seconds are still to come
