"""`python -m hpcllm`."""

import sys

from hpcllm.cli.main import main

sys.exit(main())
