"""Small models of each kind for tests, with a batch and a loss function."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(attended), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class TinyGPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(
        self, vocabulary: int = 37, width: int = 64, layers: int = 2, heads: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(seed: int = 0, batch: int = 8, length: int = 32, **options: object) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    model = TinyGPT(**options)  # type: ignore[arg-type]
    tokens = torch.randint(0, 37, (batch, length + 1))
    return model, (tokens[:, :-1], tokens[:, 1:])


def repeated_heads(x: Tensor) -> Tensor:
    """[batch, GROUPS, length, width] -> [batch, HEADS, length, width], as transformers has it."""
    batch, groups, length, width = x.shape
    copies = GroupedBlock.COPIES
    return x[:, :, None].expand(batch, groups, copies, length, width).reshape(batch, groups * copies, length, width)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class GroupedBlock(nn.Module):
    """[batch, length, WIDTH] -> the same: attention whose keys and values are repeated for groups of its heads."""

    WIDTH, HEADS, GROUPS = 64, 8, 2
    COPIES, HEAD_WIDTH = HEADS // GROUPS, WIDTH // HEADS

    def __init__(
        self, repeat: Callable[[Tensor], Tensor] = repeated_heads, attend: Callable[..., Tensor] = attended
    ) -> None:
        super().__init__()
        self.norm, self.repeat, self.attend = nn.LayerNorm(self.WIDTH), repeat, attend
        self.q, self.out = nn.Linear(self.WIDTH, self.WIDTH), nn.Linear(self.WIDTH, self.WIDTH)
        self.k, self.v = (nn.Linear(self.WIDTH, self.GROUPS * self.HEAD_WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.HEAD_WIDTH)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (self.repeat(part * 1.5) for part in (k, v))
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class GroupedQueries(nn.Module):
    """Two such blocks."""

    def __init__(self, *kind: Callable[..., Tensor], checkpoints: bool = False) -> None:
        """kind: what a block takes."""
        super().__init__()
        self.blocks, self.checkpoints = nn.ModuleList(GroupedBlock(*kind) for _ in range(2)), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


class SmallCNN(nn.Module):
    """Images [batch, 1, 16, 16] -> logits [batch, 10]: convolutions, BatchNorm, ReLU, max pooling, a residual."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(x + self.norm2(self.conv2(x)))
        x = F.relu(self.conv3(F.max_pool2d(x, 2)), inplace=True)
        return self.head(x.mean((2, 3)))


def cnn(seed: int = 0, batch: int = 16) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    return SmallCNN(), (torch.randn(batch, 1, 16, 16), torch.randint(0, 10, (batch,)))


class Routed(nn.Module):
    """A mixture of two experts that sends each token to the one its router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 2), nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        choice = gates.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, gates[rows, number, None] * torch.tanh(expert(x[rows])))
        return x + out


class Mixture(nn.Module):
    """[tokens, 64] -> [tokens, 64]: a block that routes and one that does not, each under a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.routed, self.plain = nn.Linear(64, 64), Routed(), nn.Linear(64, 64)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.routed, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        return checkpoint(self.plain, x, use_reentrant=self.reentrant)


def mlp(seed: int = 0, batch: int = 64, width: int = 64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10),
    )  # fmt: skip
    return model, (torch.randn(batch, 32), torch.randint(0, 10, (batch,)))


def loss_of(model: nn.Module):
    """A loss function of a batch (inputs, targets) for any of these models."""

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    return loss_fn


def gradient(model: nn.Module) -> Tensor:
    """All parameter gradients in one flat tensor."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def losses_under(
    gact: Any, model: nn.Module, batch: Any, steps: int, *, follow: bool, loss_fn: Any = None
) -> list[float]:
    """The losses of a job that steps in the one way or the other. loss_fn: what step() measures with, if another."""
    loss_of_batch, losses = loss_of(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if follow:
        gact.follow()
    for _ in range(steps):
        with nullcontext() if follow else gact.step(loss_fn or loss_of_batch, batch):
            loss = loss_of_batch(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train(
    model: nn.Module, batch: tuple[Tensor, Tensor], gact: Any = None, steps: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, all weights in one flat tensor and the state of the batch's random generator after a few steps.

    gact: a controller of the model, None for the untouched job.
    """
    device, loss_fn = batch[0].device, loss_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        with nullcontext() if gact is None else gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    return torch.stack(losses), torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), state
