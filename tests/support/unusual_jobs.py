"""Small jobs with unusual tensors, modules and transforms: each is a model, its loss function and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, jvp, vjp, vmap

NODES, WIDTH = 100, 64


class Job(NamedTuple):
    model: nn.Module
    loss_fn: Callable[[Any], Tensor]
    batch: Any
    warm_up: int = 0
    """forwards after which torch.jit runs the code that it keeps"""


def squared(model: nn.Module, batch: Any, warm_up: int = 0) -> Job:
    """The mean square of what a model returns."""
    return Job(model, lambda inputs: model(inputs).square().mean(), batch, warm_up)


# -- graphs -------------------------------------------------------------------------------------------------------


class Graph(nn.Module):
    """Two layers of a graph network, its adjacency a buffer or part of the batch."""

    def __init__(self, adjacency: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, adjacency: Tensor | None = None) -> Tensor:
        adjacency = self.adjacency if adjacency is None else adjacency
        return adjacency @ self.last((adjacency @ self.first(x)).relu())


def graph(layout: torch.layout, in_batch: bool) -> Job:
    dense = (torch.rand(NODES, NODES) < 0.1).float()
    adjacency = dense if layout is torch.strided else dense.to_sparse(layout=layout)
    x, y = torch.randn(NODES, WIDTH), torch.randint(0, WIDTH, (NODES,))
    if in_batch:
        model = Graph(None)
        return Job(model, lambda batch: F.cross_entropy(model(batch[1], batch[0]), batch[2]), (adjacency, x, y))
    model = Graph(adjacency)
    return Job(model, lambda inputs: F.cross_entropy(model(inputs), y), x)


class Words(nn.Module):
    """An embedding whose gradient is sparse, and a layer; its weight may be used once more, with a dense gradient."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
        self.tied = tied

    def forward(self, words: Tensor) -> Tensor:
        h = self.layer(self.embedding(words)).tanh()
        return h @ self.embedding.weight.t() if self.tied else h


# -- what custom functions save -----------------------------------------------------------------------------------


class Saves(torch.autograd.Function):
    """Twice its input; its backward multiplies by something that it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(make(x.detach()))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return grads[0] * (saved.dequantize() if saved.is_quantized else saved.to(torch.float32)), None


def saving(make: Callable[[Tensor], Tensor]) -> Job:
    inner, outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = inner, outer

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(Saves.apply(self.inner(x), make))

    return squared(Saving(), torch.randn(32, WIDTH))


def quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def counted(dtype: torch.dtype, largest: int) -> Callable[[Tensor], Tensor]:
    """Whole numbers from 0 to the largest."""
    return lambda x: (torch.arange(x.numel()).view(x.shape) % (largest + 1)).to(torch.float32).to(dtype)


class FlashAttention(torch.autograd.Function):
    """A fused attention as others write it: it saves q, k, v, its result and the logsumexp of the scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        logsumexp = scores.logsumexp(-1)
        out = (scores - logsumexp[..., None]).exp() @ v
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        p = (q @ k.transpose(-1, -2) * scale - logsumexp[..., None]).exp()
        ds = p * (grads[0] @ v.transpose(-1, -2) - (grads[0] * out).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grads[0]


class RebindingAttention(FlashAttention):
    """Its forward assigns other tensors to the names of its arguments."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, v = given = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in given)
        return FlashAttention.forward(ctx, q, k, v)


class DecoratedAttention(FlashAttention):
    """Its forward is behind a decorator, as that of a kernel for autocast is."""

    forward = staticmethod(torch.amp.custom_fwd(FlashAttention.forward, device_type="cpu"))


class TwoPartAttention(FlashAttention):
    """Its forward is in two parts; it saves in the second."""

    @staticmethod
    def forward(*given: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = given
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        logsumexp = scores.logsumexp(-1)
        return (scores - logsumexp[..., None]).exp() @ v, logsumexp

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)


class OwnAttention(nn.Module):
    def __init__(self, scale: float, attend: Any = FlashAttention.apply) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out, self.scale = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        attended = self.attend(q * self.scale, k * self.scale, v)
        attended = attended if isinstance(attended, Tensor) else attended[0]
        return self.out(attended.transpose(1, 2).flatten(-2)) - 1


class Gated(torch.autograd.Function):
    """silu(a) b, of two inputs and nothing else."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gate = a.sigmoid()
        return grads[0] * b * gate * (1 + a * (1 - gate)), grads[0] * a * gate


class RmsNorm(torch.autograd.Function):
    """x / rms(x), of one input and a statistic of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inverse = x.square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, inverse)
        return x * inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, inverse = ctx.saved_tensors
        return inverse * (grads[0] - x * inverse**2 * (grads[0] * x).mean(-1, keepdim=True))


class OwnFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = RmsNorm.apply(x + self.a(x))
        return self.c(Gated.apply(self.a(x), self.b(x)))


class Dequantised(torch.autograd.Function):
    """x @ w.t() with a weight of 8-bit integers, as in bitsandbytes: only integers are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return x @ (codes.float() * scale).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        codes, scale = ctx.saved_tensors
        return grads[0] @ (codes.float() * scale), None, None


class QLoRA(nn.Module):
    """LoRA on a linear layer whose quantised weight is dequantised in a custom function or by plain operators."""

    def __init__(self, inputs: int, outputs: int, custom: bool) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs) / inputs**0.5
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.codes = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.down = nn.Parameter(torch.randn(8, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, 8) / 10)
        self.custom = custom

    def forward(self, x: Tensor) -> Tensor:
        if self.custom:
            y = Dequantised.apply(x, self.codes, self.scale)
        else:
            y = F.linear(x, (self.codes.to(torch.bfloat16) * self.scale.bfloat16()).float())
        return y + x @ self.down.t() @ self.up.t()


def qlora(custom: bool) -> Job:
    base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model = nn.Sequential(base, QLoRA(WIDTH, 2 * WIDTH, custom), nn.GELU(), QLoRA(2 * WIDTH, WIDTH, custom))
    return squared(model, torch.randn(32, WIDTH))


# -- modules ------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def lazy(convolution: bool) -> Job:
    if convolution:
        layers = [nn.LazyConv2d(16, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.LazyConv2d(16, 3), nn.Flatten()]
        return squared(nn.Sequential(*layers, nn.LazyLinear(10)), torch.randn(8, 3, 16, 16))
    layers = [nn.LazyLinear(WIDTH), nn.GELU(), nn.Dropout(0.1), nn.LazyLinear(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10)]
    return squared(nn.Sequential(*layers), torch.randn(32, 48))


def scripted(traced: bool) -> Job:
    inner = torch.jit.trace(Mlp(), torch.randn(32, WIDTH)) if traced else torch.jit.script(Mlp())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return squared(model, torch.randn(32, WIDTH), warm_up=3)


@torch.jit.script
def branch(x):
    return (x * x).tanh() * x


@torch.jit.script
def with_fork(x):
    future = torch.jit.fork(branch, x * 2)
    beside = x.sin() * x
    return torch.jit.wait(future) + beside


class Forked(nn.Module):
    """Runs a part of its forward in a thread without Python frames."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(with_fork(self.first(x)))


class Transformed(nn.Module):
    """Uses torch.func in its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(getattr(self, self.how)(x, self.first(x))))

    def grad(self, x: Tensor, h: Tensor) -> Tensor:
        return h * vmap(grad(lambda row: torch.tanh(row).square().sum()))(x)

    def weights(self, _: Tensor, h: Tensor) -> Tensor:
        parameters = dict(self.last.named_parameters())
        loss = grad(lambda values: functional_call(self.last, values, (torch.tanh(h),)).square().mean())
        return 2 * h + loss(parameters)["bias"]

    def vmap(self, _: Tensor, h: Tensor) -> Tensor:
        return vmap(lambda row: torch.tanh(row * row.sum() / 100))(h)

    def functional_call(self, _: Tensor, h: Tensor) -> Tensor:
        return functional_call(self.last, {n: 1.1 * p for n, p in self.last.named_parameters()}, (torch.tanh(h),))

    def jvp(self, _: Tensor, h: Tensor) -> Tensor:
        return jvp(torch.tanh, (h,), (torch.ones_like(h),))[1]

    def vjp(self, _: Tensor, h: Tensor) -> Tensor:
        result, backward = vjp(torch.tanh, h)
        return result + backward(torch.ones_like(result))[0]


def per_example() -> Job:
    """Gradients of each example by torch.func, beside the loss."""
    model, x = nn.Linear(WIDTH, 8), torch.randn(32, WIDTH)

    def loss_fn(batch: Tensor) -> Tensor:
        frozen = {name: value.detach() for name, value in model.named_parameters()}
        per_row = vmap(grad(lambda p, row: functional_call(model, p, (row,)).square().mean()), in_dims=(None, 0))
        norms = sum(value.square().mean() for value in per_row(frozen, batch).values())
        return torch.tanh(model(batch)).square().mean() * (1 + norms)

    return Job(model, loss_fn, x)


class Jagged(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.embedding, self.first, self.last = (
            nn.Embedding(50, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.layout = layout

    def forward(self, sequences: list[Tensor]) -> Tensor:
        x = torch.nested.as_nested_tensor([self.embedding(part) for part in sequences], layout=self.layout)
        return self.last(F.gelu(self.first(x)))


def nested(layout: torch.layout) -> Job:
    model = Jagged(layout)

    def loss_fn(batch: list[Tensor]) -> Tensor:
        out = model(batch)
        plain = out.values() if layout is torch.jagged else torch.nested.to_padded_tensor(out, 0.0)
        return plain.square().mean()

    return Job(model, loss_fn, [torch.randint(0, 50, (length,)) for length in (5, 17, 9, 12, 20, 33)])


class InsideHooks(nn.Module):
    """Runs a part of its forward under other people's hooks for saved tensors."""

    def __init__(self, hooks: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second, self.hooks = Mlp(), Mlp(), hooks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with self.hooks():
            return x + self.second(x)


def as_numpy() -> Any:
    return saved_tensors_hooks(lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy)


class Beside(nn.Module):
    """A compiled module beside a sparse buffer and a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.compiled.compile(backend="aot_eager")
        self.register_buffer("mixing", (torch.rand(WIDTH, WIDTH) < 0.1).float().to_sparse())
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.compiled(torch.sparse.mm(self.mixing, self.first(x)))
        return self.last(h * vmap(grad(lambda row: torch.tanh(row).sum()))(x))


JOBS: dict[str, Callable[[], Job]] = {
    "dense adjacency in a buffer": lambda: graph(torch.strided, False),
    "COO adjacency in a buffer": lambda: graph(torch.sparse_coo, False),
    "CSR adjacency in a buffer": lambda: graph(torch.sparse_csr, False),
    "dense adjacency in the batch": lambda: graph(torch.strided, True),
    "COO adjacency in the batch": lambda: graph(torch.sparse_coo, True),
    "CSR adjacency in the batch": lambda: graph(torch.sparse_csr, True),
    "sparse gradients": lambda: squared(Words(False), torch.randint(0, 50, (32, 20))),
    "sparse gradients beside dense ones": lambda: squared(Words(True), torch.randint(0, 50, (32, 20))),
    "saves qint8": lambda: saving(quantised),
    "saves uint16": lambda: saving(counted(torch.uint16, 3)),
    "saves uint32": lambda: saving(counted(torch.uint32, 3)),
    "saves uint64": lambda: saving(counted(torch.uint64, 3)),
    "saves float8": lambda: saving(counted(torch.float8_e4m3fn, 3)),
    "lazy linear": lambda: lazy(False),
    "lazy convolution": lambda: lazy(True),
    "scripted module": lambda: scripted(False),
    "traced module": lambda: scripted(True),
    "torch.jit.fork": lambda: squared(Forked(), torch.randn(32, WIDTH), warm_up=3),
    **{
        f"torch.func: {how}": lambda how=how: squared(Transformed(how), torch.randn(32, WIDTH))
        for how in ("grad", "weights", "vmap", "functional_call", "jvp", "vjp")
    },
    "torch.func: gradients of examples": per_example,
    "jagged tensors": lambda: nested(torch.jagged),
    "nested tensors": lambda: nested(torch.strided),
    "inside save_on_cpu": lambda: squared(InsideHooks(save_on_cpu), torch.randn(32, WIDTH)),
    "inside hooks that return an array": lambda: squared(InsideHooks(as_numpy), torch.randn(32, WIDTH)),
    "quantised weights in a custom function": lambda: qlora(True),
    "quantised weights in plain operators": lambda: qlora(False),
    "custom functions": lambda: squared(OwnFunctions(), torch.randn(32, WIDTH)),
    "fused attention in a custom function": lambda: squared(OwnAttention(1.5), torch.randn(4, 32, WIDTH)),
    "a compiled module beside others": lambda: squared(Beside(), torch.randn(WIDTH, WIDTH)),
}


class Gate(torch.autograd.Function):
    """silu(a) * b, of rows, as the kernels of Liger and of others have it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        shape = a.shape
        a, b = a.view(-1, shape[-1]), b.view(-1, shape[-1])
        ctx.save_for_backward(a, b)
        return (F.silu(a) * b).view(shape)

    @staticmethod
    def gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """The saved tensors, and the gradients at them."""
        a, b = ctx.saved_tensors
        gradient, sigmoid = gradient.reshape(a.shape), torch.sigmoid(a)
        return a, b, gradient * b * sigmoid * (1 + a * (1 - sigmoid)), gradient * a * sigmoid

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _, _, of_a, of_b = Gate.gradients(ctx, gradient)
        return of_a.view(gradient.shape), of_b.view(gradient.shape)


class Overwriting(Gate):
    """Its backward writes the gradients over what was saved, where torch sees it."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b, of_a, of_b = Gate.gradients(ctx, gradient)
        return a.copy_(of_a).view(gradient.shape), b.copy_(of_b).view(gradient.shape)


class Kernel(Gate):
    """The same, and torch sees nothing of it: what is returned has the graph of what was saved."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b, of_a, of_b = Gate.gradients(ctx, gradient)
        a.detach().numpy()[...], b.detach().numpy()[...] = of_a.detach(), of_b.detach()
        return a.view(gradient.shape), b.view(gradient.shape)
