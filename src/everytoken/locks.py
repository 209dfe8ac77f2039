from everytoken.files import LOCK, Lock

__all__ = ["LOCK", "Lock"]
