"""What tests of relocation share."""

from tests.schedule.conftest import impatient as impatient
