"""Forwards that torch.distributed.pipelining runs on a stage for its own purposes."""

import sys
from types import FrameType

_STAGE_MODULE = "torch.distributed.pipelining.stage"
_RUNS_A_MICROBATCH = "forward_one_chunk"


def learning_shapes() -> bool:
    """Whether a pipeline stage is now running its module on uninitialised memory, only to learn its output shapes.

    Before its first step a stage passes uninitialised tensors forward through its module, and ones back as gradients.
    To a hook on the module this looks like a microbatch of the job, but it is none.
    """
    if _STAGE_MODULE not in sys.modules:
        return False
    calls = _calls_in_stage(sys._getframe(1))
    return bool(calls) and _RUNS_A_MICROBATCH not in calls


def _calls_in_stage(frame: FrameType | None) -> set[str]:
    names = set()
    while frame is not None:
        if frame.f_globals.get("__name__") == _STAGE_MODULE:
            names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names
