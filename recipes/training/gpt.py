"""A GPT in plain torch: learned positions, pre-norm blocks, GELU, parameters named as in GPT-2.

It has the members of `recipes.training.model.Model`.
It can be cut into pipeline stages, whose modules keep the names of the whole model, and across heads: the rows of
`c_attn.weight` are ordered by head (query, key, value of the first head, then of the second).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ckpt.errors import ConfigurationError


@dataclass(frozen=True)
class Size:
    """The dimensions of a model.

    Attributes:
        vocabulary: number of token ids; the recipe's tokens are bytes, so at least 256.
        context: longest sequence, in tokens.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int


SIZES = {
    "nano": Size(vocabulary=256, context=64, layers=3, heads=4, width=64),
    "tiny": Size(vocabulary=256, context=64, layers=5, heads=4, width=128),
    "gpt2": Size(vocabulary=50257, context=1024, layers=12, heads=12, width=768),
    "gpt2-large": Size(vocabulary=50257, context=1024, layers=36, heads=20, width=1280),
}


class GPT(nn.Module):
    """The model of the training recipe.

    Initial values are drawn from a generator with `seed`: they are equal on every rank, and global generators do not change.

    Args:
        size: a name in `SIZES`.
        tie_embeddings: use the token embedding as output head, as GPT-2 does. `tied_names` declares the tie, because a rank
            that holds only one of the two names cannot see it.
        dropout: probability, after the embedding and after attention and MLP of every block.
    """

    def __init__(
        self, *, size: str = "tiny", tie_embeddings: bool = False, dropout: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__()
        if size not in SIZES:
            raise ConfigurationError(f"model.size={size}: there is no such size; it is one of {', '.join(SIZES)}")
        if not 0.0 <= dropout < 1.0:
            raise ConfigurationError(f"model.dropout={dropout}: expected a probability from 0 to below 1")
        self.size = SIZES[size]
        self.context = self.size.context
        self.wte: nn.Embedding | None
        self.wpe: nn.Embedding | None
        self.ln_f: nn.LayerNorm | None
        self.lm_head: nn.Linear | None
        with torch.device("meta"):  # torch's own initial values cost nothing there and draw no random numbers
            self.wte = nn.Embedding(self.size.vocabulary, self.size.width)
            self.wpe = nn.Embedding(self.size.context, self.size.width)
            self.drop = nn.Dropout(dropout)
            self.h = nn.ModuleDict({str(at): Block(self.size, dropout) for at in range(self.size.layers)})
            self.ln_f = nn.LayerNorm(self.size.width)
            self.lm_head = nn.Linear(self.size.width, self.size.vocabulary, bias=False)
        self.to_empty(device="cpu")
        self.tied_names: dict[str, str] = {}
        if tie_embeddings:
            self.lm_head.weight = self.wte.weight
            self.tied_names = {"lm_head.weight": "wte.weight"}
        self._initialize(seed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token, (batch, length, vocabulary), for tokens (batch, length).

        Between pipeline stages inputs and outputs are hidden states (batch, length, width).
        """
        hidden = inputs
        if self.wte is not None and self.wpe is not None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)
            hidden = self.drop(self.wte(inputs) + self.wpe(positions))
        for block in self.h.values():
            hidden = block(hidden)
        if self.ln_f is not None and self.lm_head is not None:
            hidden = self.lm_head(self.ln_f(hidden))
        return hidden

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return next_token_loss(output, target)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.h.values())

    def tensor_plan(self, num_ranks: int) -> dict[str, ParallelStyle]:
        """Cut heads, MLP columns and the vocabulary, as Megatron does: first by columns, then by rows, one all-reduce per half block.

        Raises:
            ConfigurationError: the heads do not divide over the ranks.
        """
        if self.size.heads % num_ranks:
            raise ConfigurationError(
                f"parallel.tp={num_ranks} cuts the model across its heads, but does not divide their number, {self.size.heads}: give a "
                "divisor"
            )
        return {
            "h.*.attn.c_attn": ColwiseParallel(),
            "h.*.attn.c_proj": RowwiseParallel(),
            "h.*.mlp.c_fc": ColwiseParallel(),
            "h.*.mlp.c_proj": RowwiseParallel(),
            "wte": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }

    def keep_stage(self, stage: int, num_stages: int) -> None:
        """Delete all modules but those of one pipeline stage; they keep their names.

        Layers are assigned in order; the first stages have one more if the number does not divide.
        """
        least, more = divmod(self.size.layers, num_stages)
        first = stage * least + min(stage, more)
        last = first + least + (stage < more)
        for name in list(self.h):
            if not first <= int(name) < last:
                del self.h[name]
        if stage > 0:
            self.wte = self.wpe = None
        if stage < num_stages - 1:
            self.ln_f = self.lm_head = None

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        """Initialize as GPT-2: normal with deviation 0.02, and less for layers that write to the residual stream."""
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / math.sqrt(2 * self.size.layers)
        for name, parameter in self.named_parameters():  # a tied parameter comes once, under its first name
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln_" in f".{name}":
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, residual if name.endswith("c_proj.weight") else 0.02, generator=generator)


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per token, of targets (batch, length) under logits of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Attention and MLP, each with a layer norm before it and a residual connection."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size, dropout)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = MLP(size, dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class Attention(nn.Module):
    """Causal self-attention over all heads, or over those whose rows of `c_attn` this rank holds."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.c_attn = nn.Linear(size.width, 3 * size.width)
        self.c_proj = nn.Linear(size.width, size.width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        by_head = self.c_attn(hidden).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2)
        query, key, value = by_head.unbind(-2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.drop(self.c_proj(attended.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two linear layers; the inner width is four times the outer one."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(size.width, 4 * size.width)
        self.c_proj = nn.Linear(4 * size.width, size.width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drop(self.c_proj(F.gelu(self.c_fc(hidden), approximate="tanh")))
