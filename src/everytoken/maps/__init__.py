"""Score maps: the record, the store (read, write, verify), and the released .pt files.

Reading and writing a store needs numpy only, not torch.
"""

from everytoken.maps.format import StoreMeta
from everytoken.maps.score_map import ScoreMap, map_area
from everytoken.maps.store import Maps, verify
from everytoken.maps.writer import MapWriter, Skipped

__all__ = ["MapWriter", "Maps", "ScoreMap", "Skipped", "StoreMeta", "map_area", "verify"]
