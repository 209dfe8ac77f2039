"""Where a run goes on, and when it must not begin anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everytoken.engine.runfolder import RunFolder
from everytoken.errors import EverytokenError


def refuse_to_overwrite(folder: RunFolder) -> None:
    """Raise if the folder has results of an earlier run, which a new one would replace.

    A start that was killed before its first checkpoint leaves none: the best weights are written after the checkpoint
    of their epoch, and only the row of the first epoch may be there before it.
    """
    found = sorted(p.name for p in folder.path.glob("best*.safetensors"))
    found += [p.name for p in [folder.path / "summary.json"] if p.exists()]
    epochs = sum(row.get("kind") == "epoch" for row in folder.rows())
    found += [f"metrics of {epochs} epochs"] if epochs > 1 else []
    if found:
        raise EverytokenError(
            f"{folder.path} holds results of an earlier run ({', '.join(found)}) and no whole checkpoint to go on "
            "from; training would overwrite them. Choose another --output, or delete the folder."
        )


def place_in_epochs(
    state: Mapping[str, Any], updates_per_epoch: int, global_batch: int, counts_updates: bool
) -> tuple[int, int]:
    """(epochs done, updates done of the next one) of a checkpoint, in this run's epochs.

    With another batch an epoch has another number of updates. Epochs that are done stay done, and of the one under way
    the images that were seen count: the order of the images does not depend on the batch.

    Args:
        state: of the checkpoint; older ones say how many updates were done and nothing about epochs.
        counts_updates: for this task an epoch is a number of updates, whatever the batch.
    """
    if counts_updates or "epoch" not in state:
        return divmod(state["step"], updates_per_epoch)
    done: int = state["updates_of_epoch"]
    if state["updates_per_epoch"] != updates_per_epoch:
        done = min(done * state["global_batch"] // global_batch, updates_per_epoch)
    return state["epoch"], done
