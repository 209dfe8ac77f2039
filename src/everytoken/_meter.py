from everytoken.progress import Progress as Meter
from everytoken.progress import clock

__all__ = ["Meter", "clock"]
