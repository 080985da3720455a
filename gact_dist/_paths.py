"""Where this package lies: its own frames are told from the user's by their file names."""

import os

PACKAGE_ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
