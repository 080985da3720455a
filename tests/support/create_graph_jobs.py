"""Small jobs whose loss needs a backward with create_graph=True."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Job = tuple[nn.Module, tuple[Tensor, ...], Callable[[Any], Tensor]]
"""model, batch, loss function"""


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Of WGAN-GP (Gulrajani et al., 2017)."""
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return (slope.flatten(1).norm(2, dim=1) - 1).square().mean()


def critic_job(critic: nn.Module, *shape: int) -> Job:
    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        real, fake = batch
        return critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(critic, real, fake)

    return critic, (torch.randn(64, *shape), torch.randn(64, *shape)), loss_fn


def perceptron(*between: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    first, second = ([layer() for layer in between] for _ in range(2))
    return nn.Sequential(nn.Linear(32, 64), *first, nn.Linear(64, 64), *second, nn.Linear(64, 1))


def penalty() -> Job:
    return critic_job(perceptron(nn.SiLU), 32)


def leaky_penalty() -> Job:
    return critic_job(perceptron(nn.LeakyReLU), 32)


def relu_penalty() -> Job:
    return critic_job(perceptron(nn.ReLU), 32)


def norm_penalty() -> Job:
    return critic_job(perceptron(lambda: nn.LayerNorm(64), nn.SiLU), 32)


class Attending(nn.Module):
    """Query, key and value are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(32, -1)
        probability = (q @ k.transpose(-2, -1) / 32**0.5).softmax(-1)
        return self.out(torch.tanh(probability @ v)).mean(1)


def attention_penalty() -> Job:
    torch.manual_seed(0)
    return critic_job(Attending(), 8, 32)


class Learner(nn.Module):
    """A regression whose weights can be given from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1)])

    def forward(self, x: Tensor, weights: list[Tensor] | None = None) -> Tensor:
        weights = list(self.parameters()) if weights is None else weights
        x = torch.tanh(F.linear(x, *weights[0:2]))
        x = torch.tanh(F.linear(x, *weights[2:4]))
        return F.linear(x, *weights[4:6])


def maml(steps: int = 1) -> Job:
    """Inner steps on a support set, the loss on a query set (Finn et al., 2017)."""
    torch.manual_seed(0)
    model = Learner()

    def adapted(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        weights: list[Tensor] = list(model.parameters())
        for _ in range(steps):
            inner = F.mse_loss(model(inputs, weights), targets)
            gradients = torch.autograd.grad(inner, weights, create_graph=True)
            weights = [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]
        return weights

    def loss_fn(batch: tuple[Tensor, ...]) -> Tensor:
        inputs, targets, queries, answers = batch
        return F.mse_loss(model(queries, adapted(inputs, targets)), answers)

    return model, tuple(torch.randn(64, columns) for columns in (16, 1, 16, 1)), loss_fn


def hessian_vector_product() -> Job:
    """A loss and a penalty on the product of its Hessian with a vector: an inner backward, and one through it."""
    torch.manual_seed(0)
    model = Learner()
    parameters = list(model.parameters())
    vector = [torch.randn_like(parameter) for parameter in parameters]

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        loss = F.mse_loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        along = torch.stack([(g * v).sum() for g, v in zip(gradients, vector, strict=True)]).sum()
        product = torch.autograd.grad(along, parameters, create_graph=True)
        return loss + 0.01 * torch.stack([part.square().sum() for part in product]).sum()

    return model, (torch.randn(64, 16), torch.randn(64, 1)), loss_fn


class Potential(nn.Module):
    """Positions [batch, atoms, 3] -> the forces on the atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.energy(positions).sum(), positions, create_graph=True)
        return -gradient


def forces() -> Job:
    """A fit of forces, which the forward computes by a backward of its own."""
    torch.manual_seed(0)
    model = Potential()

    def loss_fn(batch: tuple[Tensor, ...]) -> Tensor:
        positions, forces = batch
        return F.mse_loss(model(positions), forces)

    return model, (torch.randn(16, 8, 3), 0.1 * torch.randn(16, 8, 3)), loss_fn


JOBS: dict[str, Callable[[], Job]] = {
    job.__name__: job
    for job in (
        penalty, leaky_penalty, relu_penalty, norm_penalty, attention_penalty, maml, hessian_vector_product, forces,
    )
}  # fmt: skip
