"""Seeds of the stochastic rounding: from the job's seed, the rank, the step and the tensor's name, and nothing else."""

import hashlib

import torch


def refuse_inside_capture() -> None:
    """Raise RuntimeError while a CUDA graph is captured: it would keep the seeds, and so the noise, of one step."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step of gact_dist began while a CUDA graph is captured: each replay would round with the random numbers "
            "of this step and under its plan. Capture without gact_dist (policy 'off', or no attach), or leave the "
            "model's forward out of the capture"
        )


class RoundingKeys:
    """The seeds of one rank: the same after a resume, others in every step, on every rank and for every name."""

    def __init__(self, seed: int, rank: int) -> None:
        self._rank_key = _mix(seed, rank)
        self._step_key = 0
        self._hashes: dict[str, int] = {}

    def begin(self, step: int) -> None:
        """From now on the seeds are those of a step."""
        self._step_key = _mix(self._rank_key, step)

    def seed(self, name: str) -> int:
        """A signed 64-bit integer for a tensor's name."""
        key = self._hashes.get(name)
        if key is None:
            key = self._hashes[name] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        return _mix(self._step_key, key) - 2**63


def _mix(key: int, value: int) -> int:
    """A 64-bit key from two (the finaliser of SplitMix64, Steele et al., 2014)."""
    mixed = (key ^ value * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31
