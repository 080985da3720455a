"""Tensors that the tests of the operators share."""

import torch
from torch import Tensor


def random_tensor(numel: int, dtype: torch.dtype, scale: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


def raw(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def special_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """Flat tensors of some thousand elements with what is rare: infinities, NaN, constants, extreme ranges."""
    info = torch.finfo(dtype)
    smallest = torch.tensor(1, dtype=torch.int32 if dtype.itemsize == 4 else torch.int16).view(dtype).item()
    base = random_tensor(2048, dtype)
    cases = {"constant": torch.full_like(base, -1.7), "zeros": torch.zeros_like(base)}
    cases["signed zeros"] = torch.where(base > 0, 0.0, -0.0).to(dtype)
    cases["subnormal"] = (torch.arange(2048) % 7).to(dtype) * smallest
    cases["largest"] = base.clone().fill_(info.max)
    cases["lowest"] = base.clone().fill_(info.min)
    cases["whole range"] = torch.where(base > 0, info.max, info.min).to(dtype)
    cases["mask"] = torch.where(base > 0, 0.0, info.min).to(dtype)
    cases["near the top"] = (info.max * (1 - base.float().abs() / 100)).to(dtype)
    cases["tiny"] = (base.float() * 1e-36).to(dtype)
    cases["wide"] = (base.float() * torch.logspace(-30, 30, 2048)).clamp(info.min, info.max).to(dtype)
    for name, values in (("minus", [-torch.inf]), ("plus", [torch.inf]), ("both", [-torch.inf, torch.inf])):
        for every in (1, 3, 200):
            case = base.clone()
            case[::every] = torch.tensor(values).repeat(2048)[: case[::every].numel()].to(dtype)
            cases[f"{name} infinity, every {every}"] = case
    cases["attention mask"] = torch.where(base > 0, 0.0, -torch.inf).to(dtype)
    cases["nan"] = base.clone()
    cases["nan"][700] = torch.nan
    cases["negative nan"] = base.clone()
    raw(cases["negative nan"])[-1] = 0xFF
    raw(cases["negative nan"])[-2] = 0xFF
    return cases
