"""Find trouble before training does: in images, score maps, runs and the machine. Each finding says what to do."""

from everytoken_lab.doctor.diagnose import diagnose
from everytoken_lab.doctor.findings import Finding

__all__ = ["Finding", "diagnose"]
