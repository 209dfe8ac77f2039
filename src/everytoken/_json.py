from everytoken.files import plain_json

__all__ = ["plain_json"]
