"""everytoken: train vision transformers on every token.

Importing this package makes its models known to timm and does nothing else; torch and timm are imported when a
part that needs them is.
"""

from everytoken._register import register_with_timm
from everytoken._version import version as _version
from everytoken.errors import EverytokenError

register_with_timm()

__version__ = _version()
__all__ = ["EverytokenError", "__version__"]
