"""What tests of relocation share."""

from tests.schedule.conftest import impatient

__all__ = ["impatient"]
