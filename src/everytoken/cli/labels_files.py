from everytoken.classes import read_class_names as read_names

__all__ = ["read_names"]
