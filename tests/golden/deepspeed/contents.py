"""The run whose state the golden checkpoints of DeepSpeed hold, built anew from formulas, without random numbers."""

from __future__ import annotations

import torch

STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")


class Shift(torch.nn.Module):
    """Has buffers, of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean.to(x.dtype)) * self.weight


class Net(torch.nn.Module):
    """A model with buffers, tied weights, odd numbers of elements, and a parameter that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.norm = Shift()
        self.out = torch.nn.Linear(3, 7, bias=False)
        self.out.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.out(self.norm(self.embed(tokens))) * self.scale).square().mean()


def numbers(like: torch.Tensor, first: int) -> torch.Tensor:
    """Exact in float32, and not in bfloat16, but for the first few; neighbours differ."""
    return ((torch.arange(like.numel()) * 37 + first * 1109) % 2503 - 1251).reshape(like.shape).float() / 8


def groups_of(net: Net) -> list[dict[str, object]]:
    return [
        {"params": [net.embed.weight], "weight_decay": 0.125},
        {"params": [net.norm.weight, net.scale], "weight_decay": 0.0, "lr": 0.5},
    ]


def values(net: Net) -> dict[str, dict[str, torch.Tensor]]:
    """Name of a trained parameter -> its value as "fp32", and its moments."""
    return {
        name: {kind: numbers(one, 3 * at + more) for more, kind in enumerate(("fp32", *MOMENTS))}
        for at, (name, one) in enumerate(net.named_parameters())
        if one.requires_grad
    }


def fill_the_rest(net: Net) -> None:
    """Fill the buffers, and the parameter that is not trained: exact in bfloat16."""
    for at, one in enumerate([*net.buffers(), net.frozen]):
        one.data.copy_(numbers(one, at).to(torch.int32) % 128)


def run_of(*, filled: bool) -> tuple[Net, torch.optim.AdamW]:
    """A model and its AdamW.

    Args:
        filled: with the values that are saved; otherwise with others, and without a state of the optimizer.
    """
    net = Net()
    optimizer = torch.optim.AdamW(groups_of(net), lr=0.25)
    with torch.no_grad():
        for one in net.parameters():
            one.fill_(1.5)
            one.grad = torch.zeros_like(one)
        if filled:
            optimizer.step()  # makes the state
            fill_the_rest(net)
            for name, one in values(net).items():
                parameter = net.get_parameter(name)
                parameter.copy_(one["fp32"])
                optimizer.state[parameter]["step"].fill_(float(STEPS))
                for kind in MOMENTS:
                    optimizer.state[parameter][kind].copy_(one[kind])
        else:
            for group in optimizer.param_groups:
                group["lr"] = 8.0
    return net, optimizer
