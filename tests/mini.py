"""A model that is smaller than the recipe's smallest: for runs whose point is what is saved and loaded, not how much.

config(folder, *MINI, "parallel=fsdp", ...)
"""

from __future__ import annotations

from recipes.gpt import GPT, SIZES, Size

SIZES.setdefault("mini", Size(vocabulary=256, context=16, layers=3, heads=2, width=32))
MINI = ["model._target_=tests.mini.MiniGPT"]
"""56 000 parameters, with the names, ties and cuts of a `GPT`."""


class MiniGPT(GPT):
    """A GPT, of which nothing has to be chosen."""

    def __init__(
        self, *, size: str = "mini", tie_embeddings: bool = False, dropout: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__(
            size="mini" if size == "tiny" else size, tie_embeddings=tie_embeddings, dropout=dropout, seed=seed
        )
