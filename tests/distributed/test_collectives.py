"""Agreement across real ranks: means, what is left out, differing names, plans, and how many collectives it takes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import count_collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gact_dist
from gact_dist.distributed import collectives as sync

INF = math.inf


def reduced(names_by_rank, rows_by_rank):
    """Statistics of this rank's names and rows, as plain values, with the number of collectives."""
    rank = dist.get_rank()
    columns = len(rows_by_rank[0][0])
    values = torch.tensor(rows_by_rank[rank], dtype=torch.float64).reshape(len(names_by_rank[rank]), columns)
    with count_collectives() as count:
        result = sync.reduce_statistics(names_by_rank[rank], values)
    return result.names, result.mean, result.valid_ranks.tolist(), result.invalid, count.total


def reduced_random():
    values = torch.rand(1000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    return values, sync.reduce_statistics([f"t{i}" for i in range(1000)], values).mean


def reduced_with_other_columns():
    try:
        sync.reduce_statistics(["a"], torch.ones(1, 7 + dist.get_rank()))
    except ValueError as error:
        return str(error)
    return ""


def agreed(plans):
    """(digest, error text, collectives) of check_agreement on this rank's plan."""
    with count_collectives() as count:
        try:
            digest, text = sync.check_agreement(plans[dist.get_rank()]), ""
        except sync.PlanMismatchError as error:
            digest, text = "", str(error)
    return digest, text, count.total


def agreed_in_subgroup():
    """Ranks 1 and 2 disagree with each other; rank 0 is outside their group."""
    group = dist.new_group([1, 2])
    try:
        return sync.check_agreement({"a": dist.get_rank()}, group=group)
    except (ValueError, sync.PlanMismatchError) as error:
        return f"{type(error).__name__}: {error}"


def groups_of_meshes():
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    group = sync.data_parallel_group(line)
    plane = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("pp", "dp"))
    try:
        sync.data_parallel_group(plane)
    except ValueError as error:
        refusal = str(error)
    inner = sync.data_parallel_group(plane["dp"])
    return sync.world_size(group), sync.rank(group), sync.world_size(inner), refusal


@pytest.mark.parametrize("world_size", [2, 3])
def test_mean_over_ranks_takes_two_collectives(ranks, world_size):
    names = [["a", "b"]] * world_size
    rows = [[[1.0 + rank, 0.5], [10.0 * rank, 2.0**rank]] for rank in range(world_size)]
    expected = torch.tensor(rows, dtype=torch.float64).sum(0) / world_size  # exact: small dyadic numbers
    for got_names, mean, valid, invalid, collectives in ranks(reduced, names, rows, world_size=world_size):
        assert got_names == ("a", "b")
        assert torch.equal(mean, expected)
        assert (valid, invalid, collectives) == ([world_size] * 2, {}, 2)


def test_result_is_bitwise_equal_on_all_ranks(ranks):
    results = ranks(reduced_random, world_size=3)
    means = [mean for _, mean in results]
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
    # two additions of numbers below 3 and one division: three roundings of half an ulp of 3 at most
    expected = torch.stack([values for values, _ in results]).mean(0)
    torch.testing.assert_close(means[0], expected, rtol=0, atol=3 * 2.0**-52)


def test_invalid_rows_are_left_out_and_counted(ranks):
    names = [["nan", "last", "minus", "forbidden", "none"]] * 3
    good = [4.0, 2.0]
    rows = [
        [good, good, good, good, [math.nan, 1.0]],
        [[math.nan, 1.0], [1.0, INF], [-INF, 1.0], [INF, 4.0], [1.0, math.nan]],
        [[8.0, 6.0]] * 4 + [[1.0, INF]],
    ]
    for _, mean, valid, invalid, collectives in ranks(reduced, names, rows, world_size=3):
        assert torch.equal(mean[:3], torch.tensor([[6.0, 4.0]] * 3, dtype=torch.float64))
        assert torch.equal(mean[3], torch.tensor([INF, 4.0], dtype=torch.float64))
        assert mean[4].isnan().all()
        assert valid == [2, 2, 2, 3, 0]
        assert invalid == {"nan": 1, "last": 1, "minus": 1, "none": 3}
        assert collectives == 2


def test_differing_names_are_joined_in_rank_order(ranks):
    names = [["b", "a"], [], ["c", "a", "b"]]
    rows = [[[1.0], [2.0]], [], [[5.0], [4.0], [math.nan]]]
    results = ranks(reduced, names, rows, world_size=3)
    for got_names, mean, valid, invalid, _ in results:
        assert got_names == ("b", "a", "c")
        assert mean.flatten().tolist() == [1.0, 3.0, 5.0]
        assert (valid, invalid) == ([1, 2, 1], {"b": 1})


def test_the_same_names_in_another_order_are_matched_by_name(ranks):
    results = ranks(reduced, [["a", "b"], ["b", "a"]], [[[1.0], [10.0]], [[30.0], [3.0]]])
    for got_names, mean, _, _, _ in results:
        assert got_names == ("a", "b")
        assert mean.flatten().tolist() == [2.0, 20.0]


def test_differing_columns_are_refused_on_every_rank(ranks):
    for text in ranks(reduced_with_other_columns):
        assert "[7, 8] columns" in text


def test_equal_plans_in_any_order_have_one_digest_and_take_one_collective(ranks):
    results = ranks(agreed, [{"a": 4, "b": 0}, {"b": None, "a": 4}])
    assert results[0] == results[1]
    digest, text, collectives = results[0]
    assert (len(digest), text, collectives) == (16, "", 1)
    assert digest == sync.check_agreement({"b": 0, "a": 4})
    assert digest != sync.check_agreement({"b": 4, "a": 0})


def test_mismatch_names_ranks_and_first_tensor_on_every_rank(ranks):
    same, other = {"x": 1, "b": 4, "z": 1}, {"x": 1, "b": 2, "a": 3, "z": 8}
    results = ranks(agreed, [same, other, same], world_size=3)
    first, second = sync.check_agreement(same), sync.check_agreement(other)
    for _, text, _ in results:
        assert f"digest {first} on ranks 0, 2; {second} on rank 1." in text
        assert "First tensor that differs: 'a', no entry on ranks 0, 2; 3 bits on rank 1." in text
    for _, text, _ in ranks(agreed, [same, {**same, "b": None}]):
        assert "First tensor that differs: 'b', 4 bits on rank 0; exact on rank 1." in text


def test_subgroup_reports_global_ranks_and_refuses_outsiders(ranks):
    outside, *inside = ranks(agreed_in_subgroup, world_size=3)
    assert outside.startswith("ValueError: rank 0 is not in the given process group of ranks [1, 2]")
    for text in inside:
        assert "'a', 1 bits on rank 1; 2 bits on rank 2" in text


def test_device_mesh_of_one_dimension_is_its_group_and_more_are_refused(ranks):
    for rank, (size, own_rank, inner_size, refusal) in enumerate(ranks(groups_of_meshes)):
        assert (size, own_rank, inner_size) == (2, rank, 2)
        assert "2 dimensions ('pp', 'dp')" in refusal
        assert 'mesh["dp"]' in refusal


def test_without_distributed_the_same_rules_hold_alone():
    assert not dist.is_initialized()
    assert (sync.rank(), sync.world_size(), sync.data_parallel_group(None)) == (0, 1, None)
    values = torch.tensor([[INF, 2.0], [math.nan, 1.0]])
    result = sync.reduce_statistics(["a", "b"], values)
    assert result.names == ("a", "b")
    assert torch.equal(result.mean[0], torch.tensor([INF, 2.0], dtype=torch.float64))
    assert result.mean[1].isnan().all()
    assert (result.valid_ranks.tolist(), result.invalid) == ([1, 0], {"b": 1})
    with pytest.raises(TypeError, match="process_group is a str"):
        sync.data_parallel_group("dp")


@pytest.mark.parametrize(
    ("names", "shape"), [(["a"], (2, 8)), (["a", "a"], (2, 8)), (["a", "b"], (2,)), (["a"], (1, 0))]
)
def test_names_that_do_not_fit_the_rows_are_refused(names, shape):
    with pytest.raises(ValueError, match="one distinct name a row"):
        sync.reduce_statistics(names, torch.ones(shape))


def all_ranks_on(ranks_that_hold):
    return sync.all_ranks(dist.get_rank() in ranks_that_hold)


def test_a_condition_holds_only_if_it_does_on_all(ranks):
    assert ranks(all_ranks_on, (0, 1)) == [True, True]
    assert ranks(all_ranks_on, (1,)) == [False, False]


def reduced_over_a_grid():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [mesh["dp"].get_group(), mesh["tp"].get_group()]
    value = float(dist.get_rank()) if dist.get_rank() != 3 else float("nan")
    found = sync.reduce_over(["a"], torch.tensor([[value]]), groups)
    return found.mean.item(), found.invalid


def test_a_grid_of_ranks_agrees_on_one_mean(ranks):
    """Ranks 0, 2 and 1, 3 meet first: means 1 and 1 (3 is left out), then both."""
    found = ranks(reduced_over_a_grid, world_size=4)
    assert [mean for mean, _ in found] == [1.0] * 4
    assert {name for _, invalid in found for name in invalid} == {"a"}


def attached_without_group():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(torch.nn.Sequential(torch.nn.Linear(8, 8)), mesh["tp"], {"0": ColwiseParallel()})
    try:
        gact_dist.attach(model)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_tensor_parallel_models_need_their_data_parallel_group(ranks):
    assert all('process_group=mesh["dp"]' in text for text in ranks(attached_without_group, world_size=4))


class MeasurementError(ValueError):
    """What a rank raises in the tests below."""


def failing_together(failing, shape=(2,)):
    """(error, whether the group is usable afterwards, collectives) where the given ranks fail, over a grid of ranks."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    groups = [mesh[name].get_group() for name in mesh.mesh_dim_names]
    caught, ended = None, False
    with count_collectives() as count:
        try:
            with sync.raises_on_all(groups, "measuring the sensitivities"):
                if dist.get_rank() in failing:
                    raise MeasurementError(f"no memory for layer {dist.get_rank()}")
            ended = True
        except (MeasurementError, RuntimeError) as error:
            caught = error
    assert ended == (caught is None)
    usable = [sync.all_ranks(True, group) and not sync.all_ranks(dist.get_rank() != 0, None) for group in groups]
    return type(caught).__name__, str(caught), all(usable), count.total


def test_what_raises_on_one_rank_raises_on_both(ranks):
    other, failing = ranks(failing_together, [1])
    assert failing[:3] == ("MeasurementError", "no memory for layer 1", True)
    assert other[0] == "RuntimeError"
    assert other[1].startswith("measuring the sensitivities failed on other ranks")
    assert "MeasurementError: no memory for layer 1 on rank 1" in other[1]
    assert other[2]


def test_where_all_fail_each_raises_its_own_error(ranks):
    found = ranks(failing_together, [0, 1])
    assert [error[:3] for error in found] == [("MeasurementError", f"no memory for layer {n}", True) for n in (0, 1)]


def test_where_nothing_fails_one_collective_says_so(ranks):
    assert ranks(failing_together, []) == [("NoneType", "None", True, 1)] * 2


@pytest.mark.parametrize("failing", [[3], [1, 2]])
def test_all_ranks_of_a_grid_raise_and_name_those_that_failed(ranks, failing):
    for rank, (kind, text, usable, _) in enumerate(ranks(failing_together, failing, (2, 2), world_size=4)):
        assert usable
        if rank in failing:
            assert (kind, text) == ("MeasurementError", f"no memory for layer {rank}")
        else:
            assert kind == "RuntimeError"
            assert all(f"MeasurementError: no memory for layer {n} on rank {n}" in text for n in failing)
            assert text.count("MeasurementError") == len(failing)


def test_a_grid_without_a_failure_takes_one_collective_a_group(ranks):
    assert ranks(failing_together, [], (2, 2), world_size=4) == [("NoneType", "None", True, 2)] * 4


@pytest.mark.parametrize("groups", [[], [None]])
def test_without_distributed_an_error_comes_through(groups):
    with sync.raises_on_all(groups, "measuring"):
        done = True
    assert done
    with pytest.raises(MeasurementError, match="alone"), sync.raises_on_all(groups, "measuring"):
        raise MeasurementError("alone")


def test_an_interrupt_does_not_wait_for_the_other_ranks(monkeypatch):
    def refused(*_):
        raise AssertionError("a collective")

    monkeypatch.setattr(sync, "world_size", refused)
    with pytest.raises(KeyboardInterrupt), sync.raises_on_all([None], "measuring"):
        raise KeyboardInterrupt
