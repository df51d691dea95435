"""Makes the helpers beside these tests importable: ``split_oracle``, ``split_variants``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
