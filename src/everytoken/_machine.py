from everytoken.machine import cores, default_workers

__all__ = ["cores", "default_workers"]
