"""One rank of a distributed job on a CUDA device: offload beside the streams of NCCL, DDP and FSDP2."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import small_models
import torch
import torch.distributed as dist
from host_waits import host_waits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import gact_dist
from gact_dist import Config
from gact_dist.distributed import collectives as sync

DEVICE = "cuda"  # on "cpu" the device of open_offload has to be a simulated one

if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("NCCL needs a CUDA device, and torch finds none", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank."""
    store = (tmp_path_factory.mktemp("group") / "store").as_uri()
    backend = {"cuda": "nccl", "cpu": "gloo"}[DEVICE]
    device = torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else None
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


def fsdp2(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": DistributedDataParallel, "FSDP2": fsdp2}


class Job:
    """A wrapped model that trains, with gact_dist if there is a level, which has adapted."""

    def __init__(self, wrapper: str, level: str | None, **offload: int) -> None:
        plain, batch = small_models.gpt(width=256, layers=4, batch=16, length=128, dropout=0.1)
        self.model = WRAPPERS[wrapper](plain.to(DEVICE))
        self._batch = batch[0].to(DEVICE), batch[1].to(DEVICE)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self._loss_fn = small_models.loss_of(self.model)
        self.gact: gact_dist.Controller | None = None
        self.losses: list[Tensor] = []
        if level is not None:
            changes = {"offload": {"min_bytes": 1024, **offload}} if Config.from_level(level).offload.enabled else {}
            self.gact = gact_dist.attach(self.model, config=Config.from_level(level, **changes))
            self.gact.calibrate(self._loss_fn, self._batch)
        torch.manual_seed(1)

    def step(self) -> None:
        if self.gact is None:
            loss = self._loss_fn(self._batch)
        else:
            with self.gact.step():
                loss = self._loss_fn(self._batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())

    def weights(self) -> list[Tensor]:
        return [
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
            for parameter in self.model.parameters()
        ]

    def assert_at_work(self) -> None:
        if self.gact is not None:
            report, config = self.gact.report(), self.gact.config
            assert report.exact_bytes > report.retained_bytes or config.policy == "exact"
            assert (report.host_bytes > 0) == config.offload.enabled
            assert len(self.gact.history) == (config.policy == "gact")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("level", "without"), [("swap", None), ("L3", "L2")])
@pytest.mark.parametrize("max_device_bytes", [0, 1])
def test_offload_changes_no_bit(wrapper, level, without, max_device_bytes, deterministic):
    jobs = Job(wrapper, level, max_device_bytes=max_device_bytes), Job(wrapper, without)
    for job in jobs:
        torch.manual_seed(2)
        for _ in range(6):
            job.step()
        job.assert_at_work()
    found, expected = (torch.stack(job.losses) for job in jobs)
    assert torch.equal(found, expected)
    assert len(set(found.tolist())) == len(found)  # it trains
    assert all(torch.equal(a, b) for a, b in zip(*(job.weights() for job in jobs), strict=True))


def waits_of(job: Job) -> Counter[str]:
    """How often the host waits for the device in steps of a job that has adapted and in which all memory is there."""
    for _ in range(40):
        job.step()
    gc.collect()  # pinned memory of an earlier job is given back now, and not while this one is watched
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("steps"):
            for _ in range(5):
                job.step()
        with record_function("after"):
            torch.cuda.synchronize()
    assert "cudaDeviceSynchronize" in host_waits(trace.events(), "after")  # so that the trace would have shown one
    job.assert_at_work()
    return Counter(host_waits(trace.events(), "steps"))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_host_waits_no_more_than_in_the_untouched_job(wrapper):
    untouched = waits_of(Job(wrapper, None))
    for level in ("L2", "L3", "swap"):
        assert waits_of(Job(wrapper, level)) <= untouched, level


def test_the_backend_takes_the_tensors_that_plans_are_agreed_on_by():
    """Alone a rank agrees without a collective, so these are called here."""
    values = torch.arange(8, dtype=torch.float64, device=sync._collective_device(None))
    assert values.device.type == DEVICE
    dist.all_reduce(values)
    gathered = [torch.empty_like(values)]
    dist.all_gather(gathered, values)
    assert gathered[0].tolist() == list(range(8))
