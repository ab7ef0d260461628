"""How a test starts a process that imports just what the test itself imports: the installed
packages or the source tree."""

from __future__ import annotations

import os
import sys

IMPORT_PATH = os.pathsep.join(filter(None, sys.path))
