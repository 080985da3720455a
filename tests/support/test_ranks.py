"""The harness for real ranks: values, failures, recovery, and the count of collectives."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, count_collectives
from torch.nn.parallel import DistributedDataParallel


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def summed(value: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return os.getpid(), total


def raise_on_last_rank_while_others_wait() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("lost")
    dist.barrier()


def raise_unpicklable() -> None:
    raise UnpicklableError(3, 4)


def return_a_lambda() -> object:
    return lambda: None


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def sleep() -> None:
    time.sleep(60)


def hash_and_threads_of_the_server() -> tuple[int, list[str]]:
    return hash("name"), os.listdir(f"/proc/{os.getppid()}/task")


def counted() -> dict[str, int]:
    value = torch.ones(4)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))  # one bucket, one all_reduce in backward
    pair = dist.new_group([0, 1])
    counts = {}
    with count_collectives() as count:
        dist.all_reduce(value)
        dist.broadcast(value, src=0)
        dist.all_gather([torch.empty(4) for _ in range(2)], value)
    counts["python"] = count.total
    with count_collectives() as count:
        dist.all_reduce(value, group=pair)
    counts["subgroup"] = count.total
    with count_collectives() as count, model.no_sync():
        model(value).sum().backward()
    counts["no_sync"] = count.total
    with count_collectives() as count:
        model(value).sum().backward()
    counts["reducer"] = count.total
    return counts


def test_values_come_back_in_rank_order_and_the_processes_are_reused(ranks):
    first = ranks(summed, torch.arange(3.0), world_size=2)
    second = ranks(summed, torch.arange(3.0), world_size=2)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({os.getpid(), *(pid for pid, _ in first)}) == 3
    for _, total in first:
        assert torch.equal(total, 3 * torch.arange(3.0))


def test_collectives_are_counted_from_python_subgroups_and_the_ddp_reducer(ranks):
    assert ranks(counted) == [{"python": 3, "subgroup": 1, "no_sync": 0, "reducer": 1}] * 2


def test_exception_keeps_its_type_and_carries_the_ranks_traceback(ranks):
    with pytest.raises(KeyError, match="lost") as caught:
        ranks(raise_on_last_rank_while_others_wait)
    assert "on rank 1" in str(caught.value.__cause__)
    assert "raise_on_last_rank_while_others_wait" in str(caught.value.__cause__)
    assert torch.equal(ranks(summed, torch.ones(1))[0][1], torch.tensor([3.0]))


@pytest.mark.parametrize("function", [raise_unpicklable, return_a_lambda])
def test_what_cannot_be_pickled_is_said(ranks, function):
    with pytest.raises(RankError, match="cannot be sent between processes"):
        ranks(function)


def test_dead_rank_is_named_and_the_next_call_works(ranks):
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        ranks(die_on_rank_one)
    assert torch.equal(ranks(summed, torch.ones(1))[0][1], torch.tensor([3.0]))


def test_timeout_names_the_silent_ranks(ranks):
    with pytest.raises(RankError, match=r"sleep: no answer from ranks \[0, 1\] within 0.5 s"):
        ranks(sleep, timeout_s=0.5)


def test_servers_of_ranks_have_one_thread_and_hash_strings_differently(ranks):
    (first, threads), (second, other_threads) = ranks(hash_and_threads_of_the_server)
    assert len(threads) == len(other_threads) == 1  # a lock that another thread held would stay locked in a fork
    assert first != second
