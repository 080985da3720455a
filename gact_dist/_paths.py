"""Where this package is installed: file names tell its own frames from the user's."""

import os

PACKAGE_ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
