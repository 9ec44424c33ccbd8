"""`python -m vllm_locust` is the command `vllm-locust`."""

import sys

from vllm_locust.cli import main

sys.exit(main())
