"""`python -m examples.train`: one rank of a training run, see train.py."""

import sys

from .train import main

sys.exit(main())
