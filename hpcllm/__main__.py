"""`python -m hpcllm`."""

import sys

from hpcllm.cli import main

sys.exit(main())
