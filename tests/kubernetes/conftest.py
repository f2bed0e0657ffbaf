"""The modules that the tests share with the integration tier."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integration"))
