"""Sampled log-probabilities: their exp() is right on average, and a group's sum nearly so every time."""

from __future__ import annotations

import math

import pytest
import torch
from live_storages import StorageCount
from torch._subclasses.fake_tensor import FakeTensorMode

from gact_dist import codec
from gact_dist.codec import ops, sampled, sampling

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
GROUP = sampled.GROUP


def log_probabilities(rows=24, words=4096, dtype=torch.float32, sharpness=3.0):
    """Of words in the order of their frequency, roughly."""
    generator = torch.Generator().manual_seed(0)
    frequency = -torch.arange(1.0, words + 1).log()
    logits = frequency + sharpness * torch.randn(rows, words, generator=generator)
    return logits.log_softmax(-1).to(dtype)


def restored(x, seed=3):
    packed = codec.pack_log_probabilities(x, seed)
    assert packed.kind == "sampled"
    found = codec.unpack(packed)
    assert (found.shape, found.dtype, found.stride()) == (x.shape, x.dtype, x.stride())
    return found


def in_groups(x):
    missing = -x.shape[-1] % GROUP
    return torch.nn.functional.pad(x.double(), (0, missing), value=-math.inf).view(-1, GROUP)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("words", [4096, 4100, 1024, 50_257])
def test_a_word_comes_back_as_itself_as_the_largest_of_its_group_or_not_at_all(words, dtype):
    x = log_probabilities(6, words, dtype)
    true, found = in_groups(x), in_groups(restored(x))
    largest = true.amax(1, True)
    # the stored logarithm is a float16, rounded up: 11 significant bits
    chosen = (found >= largest) & (found <= largest + largest.abs() * 2.0**-10 + 2.0**-24)
    is_wide = ~(chosen | (found == -math.inf)).all(1)
    # at most one group of 64 in each chunk of rows, and one more where 64 do not divide it
    assert 0 < is_wide.sum() <= len(true) / 64 + 6
    found, true = found[is_wide], true[is_wide]
    is_word = true != -math.inf
    assert torch.equal(found[~is_word], true[~is_word])
    assert ((found - true).abs() <= 2.0**-11 * true.abs())[is_word].all()  # 11 significant bits, rounded to nearest


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_sum_of_a_group_is_off_by_less_than_its_largest(dtype):
    x = log_probabilities(dtype=dtype)
    true, found = in_groups(x), in_groups(restored(x))
    largest = true.amax(1) * (1 - 2.0**-10) + 2.0**-24  # as it may be stored
    apart = (found.exp().sum(1) - true.exp().sum(1)).abs()
    # sums of 32 parts rounded to 2^-24 of the largest; in groups of float16 each is off by 2^-11 of its logarithm
    assert (apart <= largest.exp() * (1 + 2.0**-16)).all()


def test_probabilities_are_right_on_average_with_the_variance_of_one_bit():
    x, draws = log_probabilities(8, 4096), 200
    p = x.double().exp()
    largest = in_groups(x).amax(1, True).exp().expand(-1, GROUP).reshape(p.shape)
    errors = [codec.unpack(codec.pack_log_probabilities(x, seed)).double().exp() - p for seed in range(draws)]
    one = torch.stack(errors).square().mean(0).sum()
    mean = torch.stack(errors).mean(0).square().sum()
    # without bias the mean of n draws has 1 / n of the variance of one, and scatters about that
    assert mean < 1.5 * one / draws
    # p (m - p) for all groups would be more: those where it is largest have a float16 for each word
    assert one < 0.5 * (p * (largest - p)).sum()


def test_a_certain_word_is_as_good_as_exact():
    """The gradient of a target that the model expects is p - 1."""
    x = log_probabilities(64, 4096)
    x[:, 7] = 6.0
    x = x.log_softmax(-1)
    found = restored(x)
    short = (1 - x[:, 7].double().exp()).abs()
    assert ((found[:, 7] - x[:, 7]).abs() <= 2.0**-9 * short).all()


def test_very_unlikely_words_are_not_lost():
    """A word at 1e-6 of the largest of its group has its chance, in no few bits of a random number."""
    x = torch.full((64, 8192), -14.0)
    x[:, ::GROUP] = 0.0
    x = x.log_softmax(-1)
    is_rare = torch.arange(8192) % GROUP != 0
    draws = 150
    mean = sum(restored(x, seed).exp()[:, is_rare].mean().item() for seed in range(draws)) / draws
    expected = x[0, 1].exp().item()
    # 64 x 256 groups, each with a sum of 31 x 8e-7 of its largest, in 150 draws: 62 chosen, up to 8 more or less by
    # chance; one of 64 groups has a float16 for each word
    assert abs(mean / expected - 1) < 5 / math.sqrt(62)


@pytest.mark.parametrize("dtype", FLOATS)
def test_banned_words_stay_impossible_and_nan_stays(dtype):
    x = log_probabilities(16, 2048, dtype)
    x[:, 100:400] = -math.inf
    x[:, 700] = torch.finfo(dtype).min
    x[3, 1500] = math.nan
    x[5] = math.nan
    found = restored(x)
    assert (found[:, 100:400].exp()[[0, 1, 2, 3, 4, *range(6, 16)]] == 0).all()
    assert (found[:, 700].exp()[[0, 1, 2, 3, 4]] == 0).all()
    assert found[3, 1500].isnan()
    assert found[5].isnan().all()
    is_hit = x.view(16, -1, GROUP).isnan().any(-1, True).expand(-1, -1, GROUP).reshape(x.shape)
    assert not found[~is_hit].isnan().any()
    assert (found[~is_hit] <= 0).all()


def test_one_word_alone_is_certain():
    x = torch.full((40, 1024), -math.inf)
    x[:, 77] = 0.0
    assert torch.equal(restored(x), x)


def test_a_seed_selects_the_numbers_and_the_global_state_is_left_alone():
    x = log_probabilities()
    before = torch.get_rng_state()
    first, again, other = (codec.pack_log_probabilities(x, seed).payload for seed in (-(2**63), -(2**63), 2**63 - 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    # rows have numbers of their own, in every chunk
    same = x[:1].expand(64, -1).contiguous()
    found = restored(same).unique(dim=0)
    assert len(found) == 64


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 257])
def test_chunks_of_rows_end_anywhere(rows):
    x = log_probabilities(rows, 4096)
    found = restored(x).double().exp().sum(1)
    # 128 groups a row, each off by less than its largest word, which are far less than one together
    assert (found - 1).abs().max() < 0.6
    assert torch.equal(restored(x.view(1, rows, 4096)), restored(x).view(1, rows, 4096))


def test_a_word_takes_less_than_two_bits():
    x = log_probabilities(64, 32_000)
    packed = codec.pack_log_probabilities(x, 1)
    groups, chunks = 64 * 1000, 16
    wide = -(-4000 // 64) * chunks  # of 4 rows each
    expected = groups * (4 + 2) + wide * (4 + 2 * 32)
    assert packed.nbytes == sampled.total_bytes(64, 32_000)
    assert expected <= packed.nbytes <= expected + 4
    assert 8 * packed.nbytes / x.numel() < 1.78
    assert packed.average_bits == 1.25
    with FakeTensorMode() as mode:
        fake = codec.pack_log_probabilities(mode.from_tensor(x), 1)
        assert fake.nbytes == packed.nbytes
        assert codec.unpack(fake).shape == x.shape


def test_what_has_no_rows_of_words_is_left_to_others():
    x = log_probabilities(64, 2048)
    for other in (x.t(), x[:, ::2], x[:, :1000], x[:0], x.long(), x[:, :1024]):
        assert codec.pack_log_probabilities(other, 0) is None
    assert codec.pack_log_probabilities(x[0], 0) is not None


@pytest.mark.parametrize("words", [32_000, 50_257])
def test_neither_way_takes_the_memory_of_a_second_tensor(words):
    x = log_probabilities(128, words)
    limit = 3 * 2**20  # what is ranked of a section, and the words of its groups of float16
    with StorageCount(x) as count:
        packed = codec.pack_log_probabilities(x, 1)
    assert count.peak_bytes <= x.nbytes + packed.nbytes + limit
    del count
    with StorageCount(x, packed.payload) as count:
        codec.unpack(packed)
    assert count.peak_bytes <= 2 * x.nbytes + packed.nbytes + limit


def test_payloads_without_their_buffer_go_where_offload_sends_them():
    packed = codec.pack_log_probabilities(log_probabilities(), 9)
    expected, elsewhere = codec.unpack(packed), packed.payload.clone()
    bare = codec.without_payload(packed)
    assert bare.nbytes == 0
    assert torch.equal(codec.unpack(codec.with_payload(bare, elsewhere)), expected)
    with pytest.raises(ValueError, match="expected one buffer"):
        codec.to_tensors(packed)


def drawn(sample, x, first=5):
    """Bits, logarithms and variance of each group."""
    groups = sampling.groups_of(*x.shape)
    bits, logarithms = torch.empty(groups, dtype=torch.int32), torch.empty(groups, dtype=torch.float16)
    variance = sample(x, -(2**63) + 11, first, bits, logarithms)
    return bits, logarithms, variance


def decoded(restore, x, bits, logarithms):
    out = torch.empty_like(x)
    restore(bits, logarithms, out)
    return out


def hard(dtype, words):
    x = log_probabilities(7, words, dtype)
    x[0, 40:64], x[1, 3], x[1, 100], x[2] = -math.inf, math.nan, torch.finfo(dtype).min, -math.inf
    return x


@pytest.mark.parametrize("dtype", FLOATS[:3])
@pytest.mark.parametrize("words", [1024, 1029])
def test_every_instruction_set_gives_the_same_bits(dtype, words):
    x, before, found = hard(dtype, words), ops.isa(), []
    try:
        for name in ops.available_isas():
            ops.set_isa(name)
            bits, logarithms, variance = drawn(ops.sample, x)
            out = decoded(ops.sampled_words, x, bits, logarithms)
            found.append((bits, logarithms.view(torch.int16), variance.view(torch.int32), out.view(torch.uint8)))
    finally:
        if before in ops.available_isas():
            ops.set_isa(before)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


@pytest.mark.parametrize("dtype", FLOATS[:3])
@pytest.mark.parametrize("words", [1024, 1029])
def test_the_definition_differs_by_the_last_bits_of_exp(dtype, words):
    x = hard(dtype, words)
    (bits, logarithms, variance), other = drawn(ops.sample, x), drawn(sampling.sample, x)
    assert torch.equal(logarithms.nan_to_num(9.0), other[1].nan_to_num(9.0))
    # a running sum of 32 shares, each off by some units of 2^-24, passes an integer elsewhere once in 2^24 / 100
    differing = sum((int(a) ^ int(b)).bit_count() for a, b in zip(bits, other[0], strict=True))
    assert differing <= 2
    # the kernels take squares of shares p / m in steps of 2^-15, rounded down: off by less than 2 p / m of a step
    largest = logarithms.double()
    shares = (in_groups(x) - largest[:, None]).exp().sum(1)
    most = (2 * largest).exp() * shares * 2.0**-14 + 2.0**-18 * other[2]
    assert ((variance.double() / 2**24 - other[2]).abs() <= most)[largest.isfinite()].all()
    restored_words = decoded(ops.sampled_words, x, bits, logarithms)
    assert torch.equal(
        restored_words.nan_to_num(9.0), decoded(sampling.sampled_words, x, bits, logarithms).nan_to_num(9.0)
    )
