"""Token mixing by learned matrices: MLP-Mixer and ResMLP.

Paper: TL-Align, appendix A, Table 9: Y <- Norm(W)·Y with W the learned matrix; left as future work there.
Norm makes every row sum to 1; weights have any sign, so they count by size, as in equation (2). Mixer's two layers are
two such steps, whose hidden units are mixtures of tokens like any other; the activation between them is point-wise.
Cost: a product of [B, N] with each matrix.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from everytoken.functional.shares import row_normalised
from everytoken.models.align.tape import Hook, Site


class MixTokens(Hook):
    """A residual branch of linear layers over the token dimension has run."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        layers = [module] if isinstance(module, nn.Linear) else [module.fc1, module.fc2]
        mixed = shares
        for layer in layers:
            mixed = mixed @ row_normalised(layer.weight).t()  # type: ignore[union-attr,arg-type]
        self.tape.keep(self.tape.combine(mixed, shares))


def mixer_block(module: nn.Module, site: Site, name: str) -> None:
    """Rule for a block with a token MLP `mlp_tokens` or a single layer `linear_tokens`."""
    branch: Any = module.mlp_tokens if hasattr(module, "mlp_tokens") else module.linear_tokens
    if site.layer():
        site.after(branch, MixTokens(site.tape))
