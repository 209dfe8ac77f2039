"""everytoken: train vision transformers on every token.

Importing this package registers its models with timm and does nothing else.
"""

from everytoken._version import version as _version
from everytoken.errors import EverytokenError

__version__ = _version()
__all__ = ["EverytokenError", "__version__"]
