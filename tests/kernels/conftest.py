"""Triton's kernels run in its interpreter here, unless TRITON_INTERPRET=0 says that there is a card."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which is later than this
